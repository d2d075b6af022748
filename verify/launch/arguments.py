"""Reads a launch script's options and variables: parallel sizes, layers of pipeline stages, and INT4 training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from converters.megatron.pipeline import Pipeline

Server = Literal["sglang", "vllm"]

_LAYOUT, _CHUNK = "--pipeline-model-parallel-layout", "--num-layers-per-virtual-pipeline-stage"
_NUMBERS = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--expert-model-parallel-size": "ep",
    "--expert-tensor-parallel-size": "etp",
    "--decoder-first-pipeline-num-layers": "first",
    "--decoder-last-pipeline-num-layers": "last",
    "--num-virtual-stages-per-pipeline-rank": "vpp",
    _CHUNK: "chunk",
    "--mtp-num-layers": "mtp",
    "--rollout-num-gpus-per-engine": "engine",
    "--sglang-pp-size": "engine_pp",
    "--sglang-pipeline-parallel-size": "engine_pp",
    "--sglang-ep-size": "engine_ep",
    "--sglang-expert-parallel-size": "engine_ep",
    "--sglang-ep": "engine_ep",
    "--vllm-pipeline-parallel-size": "engine_pp",
    "--vllm-pp": "engine_pp",
}
# What options begin with that are handed to a rollout engine.
_SERVERS: Mapping[str, Server] = {"--sglang-": "sglang", "--vllm-": "vllm"}
_RANKS = frozenset({"tp", "pp", "ep", "etp", "engine", "engine_pp", "engine_ep"})
_SWITCHES = {
    "--account-for-embedding-in-pipeline-split": "embedding",
    "--account-for-loss-in-pipeline-split": "loss",
    "--sglang-enable-dp-attention": "dp_attention",
}
# Every option that is read.
READ = frozenset({*_NUMBERS, *_SWITCHES, _LAYOUT})
# Variables of slime's and miles' trainers, which a launch gives as NAME=value or inside the JSON of --runtime-env-json.
QAT_FLAG, QAT_GROUP = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "OPEN_TRAINING_INT4_GROUP_SIZE"
_VARIABLE = re.compile(rf"({QAT_FLAG}|{QAT_GROUP})\\*[\"']?\s*[:=]\s*\\*[\"']?(\w+)")


@dataclass(frozen=True)
class LaunchArguments:
    """What these options say; None where one is not given.

    `chunk`: layers of a virtual pipeline stage; the others of a pipeline as in `Pipeline`. `engine`: GPUs of a rollout
    engine, in `engine_pp` pipeline stages, its experts over `engine_ep` ranks. `dp_attention`: its attention is cut
    over fewer ranks than the rest. `server`: the program that it is, None where the launch does not say. `qat`: whether
    training rounds weights to INT4, in groups of `qat_group`.
    """

    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    etp: int | None = None
    first: int | None = None
    last: int | None = None
    vpp: int | None = None
    chunk: int | None = None
    mtp: int | None = None
    embedding: bool = False
    loss: bool = False
    layout: str | None = None
    engine: int | None = None
    engine_pp: int | None = None
    engine_ep: int | None = None
    dp_attention: bool = False
    server: Server | None = None
    qat: bool | None = None
    qat_group: int | None = None

    @staticmethod
    def read(words: Sequence[str], environment: Mapping[str, str] | None = None) -> LaunchArguments:
        """Reads a command line as argparse does: `--name value` or `--name=value`, and the last one counts.

        Variables count wherever a word has them, else those of `environment`. Other words are passed over. Raises
        CkptkitError for a value that is missing or no number.
        """
        found: dict[str, int | bool | str] = dict(_qat(words, environment or {}))
        if (server := server_of(words)) is not None:
            found["server"] = server
        for name, value in pairs(words):
            if name in _SWITCHES:
                found[_SWITCHES[name]] = True
            elif name in _NUMBERS:
                found[_NUMBERS[name]] = _number(name, value)
            elif name == _LAYOUT:
                found["layout"] = _given(name, value)
        return LaunchArguments(**found)  # type: ignore[arg-type]

    @property
    def engine_tp(self) -> int:
        """The tensor parallel size of a rollout engine, as slime works it out."""
        return max((self.engine or 1) // (self.engine_pp or 1), 1)

    @property
    def uneven(self) -> bool:
        """Whether they say anything about the pipeline but the number of its stages."""
        return (
            self.layout is not None
            or self.embedding
            or self.loss
            or any(value is not None for value in (self.first, self.last, self.vpp, self.chunk))
        )

    def pipeline(self, layers: int, pp: int) -> Pipeline:
        """The pipeline of a model with that many layers, as Megatron-LM's `validate_args` works out its chunks.

        Raises CkptkitError where that refuses the options.
        """
        if sum(value is not None for value in (self.vpp, self.chunk, self.layout)) > 1:
            names = f"{_CHUNK}, --num-virtual-stages-per-pipeline-rank and {_LAYOUT}"
            raise CkptkitError(f"more than one of {names}", "Megatron accepts one of them")
        vpp = self.vpp or 1
        if self.chunk is not None:
            if self.first is not None or self.last is not None:
                hint = "give --num-virtual-stages-per-pipeline-rank"
                raise CkptkitError(f"{_CHUNK} with a first or last stage of its own size", hint)
            a_stage, rest = divmod(layers + self.embedding + self.loss, pp)
            if rest or not self.chunk or a_stage % self.chunk:
                said = f"{layers} layers over {pp} stages do not divide into chunks of {_CHUNK} {self.chunk}"
                raise CkptkitError(said, "choose another number of layers a chunk")
            vpp = a_stage // self.chunk
        return Pipeline(layers, pp, vpp, self.first, self.last, self.embedding, self.loss, self.layout, self.mtp or 0)


def server_of(words: Sequence[str]) -> Server | None:
    """The rollout engine that options are handed to: vLLM by vime's `--vllm-*`, SGLang by `--sglang-*`."""
    found = {server for word in words for prefix, server in _SERVERS.items() if word.startswith(prefix)}
    return "vllm" if "vllm" in found else "sglang" if found else None


def _given(name: str, value: str | None) -> str:
    if value is None:
        hint = "copy the arguments as the launch script has them"
        raise CkptkitError(f"{name} among the launch arguments has no value", hint)
    return value


def _number(name: str, value: str | None) -> int:
    given = _given(name, value)
    said = f"{name} {given} among the launch arguments is no number"
    if not (given.isdecimal() and len(given) < 10):
        raise CkptkitError(said, "copy the arguments with their variables filled in")
    if _NUMBERS[name] in _RANKS and not int(given):
        raise CkptkitError(f"{said} of ranks", "give 1 or more, or leave it out")
    return int(given)


def _qat(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[str, int | bool]]:
    said = {name: environment[name] for name in (QAT_FLAG, QAT_GROUP) if name in environment}
    said |= {match[1]: match[2] for word in words for match in _VARIABLE.finditer(word)}
    if QAT_FLAG in said:
        yield "qat", said[QAT_FLAG].lower() not in ("", "0", "false")
    if QAT_GROUP in said:
        if not (said[QAT_GROUP].isdecimal() and len(said[QAT_GROUP]) < 10):
            hint = "copy the variables with their values filled in"
            raise CkptkitError(f"{QAT_GROUP} is {shortened(said[QAT_GROUP])}, which is no number", hint)
        yield "qat_group", int(said[QAT_GROUP])


def pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Every option with the word that is its value, None where the next word is an option too or there is none."""
    for word, after in zip_longest(words, words[1:]):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            yield name, value if equals else None if after is None or after.startswith("--") else after
