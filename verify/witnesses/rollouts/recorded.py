"""Reads what a training job recorded of a rollout: tokens, log-probabilities, prompts.

slime and miles write it with torch.save: `--save-debug-rollout-data` a list of samples (slime/utils/types.py,
`Sample.to_dict`), `--save-debug-train-data` the same samples as the trainer saw them, with its own log-probabilities
(slime/observability/train_data_utils.py; miles/utils/train_dump_utils.py has one list a field). Nothing that such a
file names is run, and classes other than those below are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ckptkit.core.dtypes import DTYPE_OF_STORAGE, ITEMSIZE
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.torch_save.records import Record
from ckptkit.formats.torch_save.saved_file import SavedFile

SIDES = {"rollout_log_probs": "the engine", "log_probs": "the trainer"}  # the field, and who computed what is in it
_STORAGES = frozenset({f"torch.{name}" for name in (*DTYPE_OF_STORAGE, *ITEMSIZE)})
# Tensors, arrays, and the classes of fields that samples have beside tokens and log-probabilities: all stay inert.
_CLASSES = re.compile(
    r"torch\.(Size|_utils\._rebuild_tensor_v2|_utils\._rebuild_parameter|storage\.UntypedStorage)"
    r"|collections\.(OrderedDict|defaultdict)|builtins\.(set|frozenset)|_codecs\.encode"
    r"|numpy\.(ndarray|dtype)|numpy\.(_core|core)\.multiarray\.(_reconstruct|scalar)"
    # A status is pickled as a call of its class or, by Python 3.11.2, as an attribute of it.
    r"|(slime|miles)\.utils\.types\.(Sample(\.(Status(\.[A-Z]+)?|SpecInfo|PrefixCacheInfo))?|AdapterRef|RewardSpec)"
    r"|copyreg\._reconstructor|builtins\.object"
)
_MAX_TEMPERATURE = 2  # what chat endpoints take as a temperature; in metadata more is another one
_SAME = "record it anew with --save-debug-rollout-data"


def _allowed(kind: str) -> bool:
    return kind in _STORAGES or _CLASSES.fullmatch(kind) is not None


@dataclass(frozen=True)
class RecordedSample:
    """A prompt and its response, as the job recorded them."""

    index: int  # its place in the file
    tokens: Sequence[int]  # of the prompt, then of the response
    response: int  # how many of them are of the response
    log_probs: Mapping[str, Sequence[float]]  # natural logarithms of the response's tokens, by key of SIDES
    mask: Sequence[bool]  # which of these the model itself wrote, and not a tool
    prompt: str | Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] | None = None  # for the chat template
    versions: tuple[str, ...] = ()  # of the engine's weights, as it counts updates
    temperature: float | None = None  # None: the file does not say
    skip_reason: str = ""  # why its log-probabilities cannot be computed from tokens alone
    clipped: bool = False  # it was sampled with top-p: its log-probabilities may be those among the tokens left

    @property
    def prompt_tokens(self) -> Sequence[int]:
        """The tokens before the response."""
        return self.tokens[: len(self.tokens) - self.response]


@dataclass(frozen=True)
class Recording:
    """All samples of a file. `rollout`: the number of the rollout, where the file says it."""

    path: Path
    samples: Sequence[RecordedSample]
    rollout: int | None = None

    @property
    def sides(self) -> Sequence[str]:
        """The keys of SIDES for which any sample has log-probabilities."""
        return [side for side in SIDES if any(side in one.log_probs for one in self.samples)]

    @property
    def versions(self) -> Sequence[str]:
        """Every version of the weights that a sample names, each once."""
        return list(dict.fromkeys(version for one in self.samples for version in one.versions))


def read_recording(path: Path) -> Recording:
    """Reads the file. Raises CkptkitError where it is no such file, or its lists do not match in length."""
    file = SavedFile(path, _allowed)
    content = file.content
    rows = list(_rows(content, path)) if isinstance(content, dict) else None
    if rows is None:
        raise CkptkitError(f"{path} holds no samples, but {type(content).__name__}", _SAME)
    if not rows:
        raise CkptkitError(f"{path} has no samples", "the rollout came to nothing; take the file of another one")
    samples = [_sample(file, index, row) for index, row in enumerate(rows)]
    number = content.get("rollout_id")
    return Recording(path, samples, number if type(number) is int else None)


def _rows(content: Mapping[Any, Any], path: Path) -> Iterator[Mapping[str, Any]]:
    """The fields of each sample; those of a trainer have names in the plural."""
    samples, columns = content.get("samples"), content.get("rollout_data")
    if isinstance(samples, list) and all(isinstance(one, dict) for one in samples):
        yield from samples
        return
    if not isinstance(columns, dict) or not isinstance(lengths := columns.get("response_lengths"), list):
        raise CkptkitError(f"{path} has no list of samples", _SAME)
    if content.get("cp_size", 1) != 1:
        raise CkptkitError(
            f"{path} holds a part of each response only: the trainer has {content['cp_size']} context parallel ranks",
            "take what --save-debug-rollout-data wrote",
        )
    whole = {key: one for key, one in columns.items() if isinstance(one, list) and len(one) == len(lengths)}
    for place in range(len(lengths)):
        yield {key: column[place] for key, column in whole.items()}


def _sample(file: SavedFile, index: int, row: Mapping[str, Any]) -> RecordedSample:
    where = f"{file.path}: sample {index}"
    numbers = partial(_numbers, file, where)
    tokens = numbers("tokens", row.get("tokens"), int)
    response = row.get("response_length", row.get("response_lengths"))
    if type(response) is not int or not 0 <= response <= len(tokens):
        raise CkptkitError(f"{where} has {len(tokens)} tokens and a response of {response!r:.40}", _SAME)
    mask = row.get("loss_mask", row.get("loss_masks"))
    given = {"loss_mask": mask} | {side: row.get(side) for side in SIDES}
    lists = {key: numbers(key, value, float) for key, value in given.items() if value is not None}
    for key, values in lists.items():
        if len(values) != response:
            raise CkptkitError(f"{where} has {len(values)} of {key} for a response of {response} tokens", _SAME)
    metadata = row.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    return RecordedSample(
        index,
        tokens,
        response,
        {side: lists[side] for side in SIDES if side in lists},
        [value != 0 for value in lists.get("loss_mask", [1] * response)],
        _prompt(row.get("prompt")) if _is_plain(options := _options(row, metadata)) else None,
        options,
        tuple(map(str, versions)) if isinstance(versions := row.get("weight_versions"), list) else (),
        _temperature(metadata),
        _skip_reason(row),
        row.get("rollout_top_p_token_ids") is not None,
    )


def _numbers(file: SavedFile, where: str, name: str, value: Any, kind: type[int] | type[float]) -> list[Any]:
    """A list of numbers or a tensor of one axis. Raises CkptkitError for anything else."""
    if isinstance(value, Record):
        value = file.read(file.tensor(value, f"{name} of sample")).tolist()
    kinds = {int} if kind is int else {int, float, bool}
    if not isinstance(value, list | tuple) or not {*map(type, value)} <= kinds:
        odd = next((one for one in value if type(one) not in kinds), None) if isinstance(value, list | tuple) else value
        wanted = "whole numbers" if kind is int else "numbers"
        raise CkptkitError(f"{where}: {name} is not a list of {wanted}, but has {odd!r:.60}", _SAME)
    return list(value)


def _prompt(value: Any) -> str | Sequence[Mapping[str, Any]] | None:
    """Text or messages; None for neither, and for none at all."""
    messages = isinstance(value, list) and all(isinstance(one, dict) and "role" in one for one in value)
    return value if value and (isinstance(value, str) or messages) and _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    """Whether it is made of what JSON has: no tensor and no instance of a class."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _options(row: Mapping[str, Any], metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the template was given besides the messages, as far as the file says it."""
    given, tools = row.get("apply_chat_template_kwargs"), metadata.get("tools")
    return (given if isinstance(given, dict) else {}) | ({"tools": tools} if isinstance(tools, list) else {})


def _temperature(metadata: Mapping[str, Any]) -> float | None:
    """What custom rollout functions may note; slime and miles themselves record no temperature."""
    asked = metadata.get("sampling_params")
    for holder in (metadata, asked if isinstance(asked, dict) else {}):
        value = holder.get("temperature")
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MAX_TEMPERATURE:
            return float(value) or 1.0  # SGLang gives log-probabilities of a greedy choice without scaling
    return None


def _skip_reason(row: Mapping[str, Any]) -> str:
    media = row.get("multimodal_inputs")
    if row.get("multimodal_train_inputs") or (
        isinstance(media, dict) and any(one is not None for one in media.values())
    ):
        return "it has images or other media"
    return "a LoRA adapter answered" if row.get("adapter") is not None else ""
