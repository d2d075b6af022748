"""The GPUs that Relax's `--resource` gives to its roles, as the options of slime that it stands for.

Source: Relax `backends/megatron/arguments.py` (_derive_cluster_args_from_resource), as of 2026-09: a role has
`[CPUs, GPUs]`; the actor's make nodes of `--num-gpus-per-node`, unless a launch gives the actor's own options.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from ckptkit.core.errors import CkptkitError
from verify.launch.options.argv import Option, last, options_of
from verify.launch.words import UnresolvedWord, Word

OPTION = "--resource"
_NODES, _EACH, _NODE = "--actor-num-nodes", "--actor-num-gpus-per-node", "--num-gpus-per-node"


def options_of_resource(words: Sequence[Word]) -> Iterator[Word]:
    """The options that `--resource` stands for; they come before those of the launch, which count more.

    Raises CkptkitError where its text is not JSON of this form.
    """
    options = options_of(words)
    word = _value(options, OPTION)
    if word is None or isinstance(word, UnresolvedWord):
        return
    try:
        gpus = {str(role): int(both[1]) for role, both in json.loads(word.text).items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        hint = 'write it as {"actor": [1, 8], "rollout": [1, 8]}: CPUs and GPUs of every role'
        raise CkptkitError(f"{word.place}: {OPTION} {word.text[:80]} is not JSON of roles", hint) from error
    given = [_number(options, name, default) for name, default in ((_EACH, 8), (_NODES, 1))]
    if gpus.get("actor", 0) > 0 and given == [8, 1]:
        each = min(_number(options, _NODE, 8) or 8, gpus["actor"])
        yield from _option(_EACH, each, word)
        yield from _option(_NODES, max(1, gpus["actor"] // each), word)
    if gpus.get("rollout", 0) > 0:
        yield from _option("--rollout-num-gpus", gpus["rollout"], word)


def _option(name: str, number: int, word: Word) -> Iterator[Word]:
    yield Word(name, word.file, word.line)
    yield Word(str(number), word.file, word.line)


def _value(options: Sequence[Option], name: str) -> Word | None:
    option = last(options, name)
    return option.value if option else None


def _number(options: Sequence[Option], name: str, default: int) -> int | None:
    word = _value(options, name)
    if word is None:
        return default
    return int(word.text) if word.text.isdecimal() and len(word.text) < 10 else None
