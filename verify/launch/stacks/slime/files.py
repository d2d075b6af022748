"""Files of settings of slime and miles: `--custom-config-path`, for all roles, and `--megatron-config-path`, for one.

Source: slime `utils/arguments.py` (slime_validate_args, parse_megatron_role_args), miles `utils/arguments.py`. Their
settings are set after the options were judged: a path in them is loaded as it is, and nothing stands in for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from verify.launch.options.argv import Option, last, options_of
from verify.launch.options.layout import READ, option_of
from verify.launch.settings.yaml_tree import NULL, Tree, read_yaml
from verify.launch.words import Word

CUSTOM, MEGATRON = "--custom-config-path", "--megatron-config-path"
_PATHS = frozenset({"load", "ref_load", "hf_checkpoint", "critic_load", "opd_teacher_load"})
_STEPS = frozenset({"ckpt_step", "ref_ckpt_step", "opd_teacher_ckpt_step"})
# Other settings that change what is loaded, or how it is cut.
_MATTERS = re.compile(r"parallel_size|checkpoint|ckpt|load$|layout|num_layers|mtp_num|lora|virtual_pipeline")
_HARMLESS = re.compile(r"recompute|no_load|finetune|save|exit_on_missing|activation")
_ROLES = ("actor", "critic")


@dataclass(frozen=True)
class RoleFiles:
    """What these files say: settings of every role, and those of one. `read` are the options whose files were read.

    `unread` has a line for every setting that matters and is not looked at.
    """

    common: Mapping[str, Word] = field(default_factory=dict)
    roles: Mapping[str, Mapping[str, Word]] = field(default_factory=dict)
    read: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()

    def path(self, role: str, name: str) -> Word | None:
        """The path that a setting gives to a role; None where no file gives it one."""
        return self._given(role, name) if name in _PATHS else None

    def step(self, role: str, name: str) -> int | None:
        """The iteration that a setting gives. Raises CkptkitError where it is not a number."""
        word = self._given(role, name) if name in _STEPS else None
        if word is None:
            return None
        if not (word.text.isdecimal() and len(word.text) < 10):
            raise CkptkitError(f"{word.place}: {name} {word.text} is not a number", "give the iteration as a number")
        return int(word.text)

    def _given(self, role: str, name: str) -> Word | None:
        return self.roles.get(role, {}).get(name, self.common.get(name))


def role_files(words: Sequence[Word]) -> RoleFiles:
    """The files that a launch names, as far as they are there. Raises CkptkitError for one that cannot be read."""
    options = options_of(words)
    custom, megatron = (_named(options, option) for option in (CUSTOM, MEGATRON))
    common = _settings(read_yaml(custom)) if custom else {}
    roles = dict(_of_roles(megatron)) if megatron else {}
    every = [(name, word) for name, word in common.items() if option_of(name) not in READ]
    every += [pair for role in roles.values() for pair in role.items()]
    unread = [f"{word.place}: {name}: {word.text}: not looked at" for name, word in every if _matters(name)]
    read = frozenset(option for option, path in ((CUSTOM, custom), (MEGATRON, megatron)) if path)
    return RoleFiles(common, roles, read, tuple(dict.fromkeys(unread)))


def _matters(name: str) -> bool:
    known = name in _PATHS | _STEPS or _HARMLESS.search(name) is not None
    return not known and _MATTERS.search(name) is not None


def _named(options: Sequence[Option], name: str) -> Path | None:
    """The file of an option; None where it is not given, or not there: then it is listed as not read."""
    option = last(options, name)
    found = Path(option.value.text) if option and option.value else None
    return found if found and found.is_file() else None


def _settings(tree: Tree | None) -> dict[str, Word]:
    """The single values of a mapping; a null sets nothing that is loaded."""
    pairs = tree.items() if isinstance(tree, dict) else ()
    return {name: value for name, value in pairs if isinstance(value, Word) and value.text != NULL}


def _of_roles(path: Path) -> Iterator[tuple[str, dict[str, Word]]]:
    """The overrides of every role. Raises CkptkitError where slime stops: at another form, or a role that is twice."""
    entries = read_yaml(path).get("megatron")
    if not isinstance(entries, list):
        raise CkptkitError(f"{path} has no list `megatron`", "write `megatron: [{role: actor, overrides: {...}}]`")
    seen: set[str] = set()
    for entry in entries:
        role = entry.get("role") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or not isinstance(role, Word) or role.text not in _ROLES:
            continue
        if role.text in seen:
            raise CkptkitError(f"{role.place}: the role {role.text} stands twice", "give every role one entry")
        seen.add(role.text)
        yield role.text, _settings(entry.get("overrides") or entry.get("args"))
