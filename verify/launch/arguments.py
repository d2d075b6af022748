"""Reads a launch script's options and variables: parallel sizes, layers of pipeline stages, and INT4 training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptkit.converters.megatron.hybrid_model import PATTERNS, stored_pattern
from ckptkit.converters.megatron.pipeline import Pipeline
from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from ckptkit.verify.launch.options.arguments import Arguments
from ckptkit.verify.launch.options.argv import options_of
from ckptkit.verify.launch.options.tables import FLAGS, NUMBERS, STAGES, option_of
from ckptkit.verify.launch.words import UnresolvedWord, Word

Server = Literal["sglang", "vllm"]

_CHUNK, _VPP = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
_SERVERS: Mapping[str, Server] = {"--vllm-": "vllm", "--sglang-": "sglang"}  # by the prefix of their options
_RANKS = frozenset({"tp", "pp", "ep", "etp", "engine", "engine_pp", "engine_ep"})
# Variables of slime and miles. A launch sets them as NAME=value, or in the JSON of --runtime-env-json.
QAT_FLAG, QAT_GROUP = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "OPEN_TRAINING_INT4_GROUP_SIZE"
_VARIABLE = re.compile(rf"({QAT_FLAG}|{QAT_GROUP})\\*[\"']?\s*[:=]\s*\\*[\"']?(\w+)")


@dataclass(frozen=True)
class LaunchArguments:
    """The sizes that a launch gives, each None if it does not. Fields of the pipeline are as in `Pipeline`."""

    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    etp: int | None = None
    first: int | None = None
    last: int | None = None
    vpp: int | None = None
    chunk: int | None = None  # layers of a virtual pipeline stage
    mtp: int | None = None
    embedding: bool = False
    loss: bool = False
    layout: str | None = None
    pattern: str | None = None  # the layer pattern of a HybridModel, "" if unknown
    engine: int | None = None  # GPUs of a rollout engine
    engine_pp: int | None = None  # its pipeline stages
    engine_ep: int | None = None  # the ranks of its experts
    dp_attention: bool = False  # its attention is cut over fewer ranks than its other layers
    server: str | None = None  # the engine's program, as its stack calls it
    qat: bool | None = None  # training rounds weights to INT4
    qat_group: int | None = None

    @property
    def engine_tp(self) -> int:
        """The tensor parallel size of a rollout engine, as slime computes it."""
        return max((self.engine or 1) // (self.engine_pp or 1), 1)

    @property
    def has_uneven_pipeline(self) -> bool:
        """Whether the pipeline has options besides the number of its stages."""
        options = (self.layout, self.first, self.last, self.vpp, self.chunk)
        return self.embedding or self.loss or any(value is not None for value in options)

    def pipeline(self, layers: int, pp: int) -> Pipeline:
        """A model's pipeline, as in Megatron-LM's `validate_args`. Raises CkptkitError if that refuses the options."""
        if sum(value is not None for value in (self.vpp, self.chunk, self.layout)) > 1:
            names = f"{_CHUNK}, {_VPP} and {option_of(STAGES)}"
            raise CkptkitError(f"the launch has several of {names}", "keep one, as Megatron requires")
        vpp = self.vpp or 1
        if self.chunk is not None:
            if self.first is not None or self.last is not None:
                raise CkptkitError(f"{_CHUNK} with another size of the first or last stage", f"pass {_VPP} instead")
            per_stage, remainder = divmod(layers + self.embedding + self.loss, pp)
            if remainder or not self.chunk or per_stage % self.chunk:
                message = f"{layers} layers over {pp} stages do not divide into chunks of {_CHUNK} {self.chunk}"
                raise CkptkitError(message, "choose another number of layers per chunk")
            vpp = per_stage // self.chunk
        return Pipeline(layers, pp, vpp, self.first, self.last, self.embedding, self.loss, self.layout, self.mtp or 0)


def launch_arguments(
    given: Arguments, words: Sequence[Word], environment: Mapping[str, str] | None = None
) -> LaunchArguments:
    """The sizes in arguments, and in variables of words and `environment`. Raises CkptkitError without a number."""
    sizes: dict[str, int | bool | str | None] = dict(_qat(words, environment or {}))
    for name in given.values:
        if name in NUMBERS and (number := _size(name, given)) is not None:
            sizes[NUMBERS[name]] = number
        elif name in FLAGS and given.value(name):
            sizes[FLAGS[name]] = True
    if STAGES in given.values:
        sizes["layout"] = _size(STAGES, given)
    if not PATTERNS.isdisjoint(given.values):
        sizes["pattern"] = stored_pattern(given.known) or ""
    return LaunchArguments(**sizes, server=server_of(words))  # type: ignore[arg-type]


def server_of(words: Sequence[Word]) -> Server | None:
    """The rollout engine that has options: vLLM by vime's `--vllm-*`, else SGLang by `--sglang-*`."""
    names = [one.name for one in options_of(words)]
    return next((server for prefix, server in _SERVERS.items() if any(name.startswith(prefix) for name in names)), None)


def _size(name: str, given: Arguments) -> int | str | None:
    """The value of an argument, or None if unresolved. Raises CkptkitError if it is missing or not a size."""
    value, word, option = given.value(name), given.get(name).word or Word(""), option_of(name)
    least = 1 if NUMBERS.get(name) in _RANKS else 0
    if value is None and not isinstance(word, UnresolvedWord) and word.text.startswith("--"):
        raise CkptkitError(f"{option} in the launch arguments has no value", "copy the arguments exactly")
    is_number = isinstance(value, int) and 0 <= value < 10**9
    if name in NUMBERS and not (is_number or isinstance(word, UnresolvedWord)):
        message = f"{option} {word.text} in the launch arguments is not a number"
        raise CkptkitError(message, "replace variables by their values in the arguments")
    if is_number and value < least:
        message = f"{option} {value} in the launch arguments is not a number of ranks"
        raise CkptkitError(message, "pass 1 or more, or leave out the option")
    return value  # type: ignore[no-any-return]


def _qat(words: Sequence[Word], environment: Mapping[str, str]) -> Iterator[tuple[str, int | bool]]:
    given = {name: environment[name] for name in (QAT_FLAG, QAT_GROUP) if name in environment}
    known = [word for word in words if not isinstance(word, UnresolvedWord)]
    given |= {match[1]: match[2] for word in known for match in _VARIABLE.finditer(word.text)}
    if QAT_FLAG in given:
        yield "qat", given[QAT_FLAG].lower() not in ("", "0", "false")
    if QAT_GROUP in given:
        if not (given[QAT_GROUP].isdecimal() and len(given[QAT_GROUP]) < 10):
            raise CkptkitError(f"{QAT_GROUP} is {shortened(given[QAT_GROUP])}", f"set {QAT_GROUP} to a number")
        yield "qat_group", int(given[QAT_GROUP])
