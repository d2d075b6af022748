"""Reads the recording of a rollout by a training job: tokens, log-probabilities, prompts.

slime and miles write it with torch.save: `--save-debug-rollout-data` a list of samples (slime/utils/types.py,
`Sample.to_dict`), `--save-debug-train-data` the same samples in the trainer, with its own log-probabilities
(slime/observability/train_data_utils.py; miles/utils/train_dump_utils.py has one list a field). No code of the file is
run, and classes other than those below are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.core.dtypes import DTYPE_OF_STORAGE, ITEMSIZE
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.torch_save.records import Record
from ckptkit.formats.torch_save.saved_file import SavedFile

SIDES = {"rollout_log_probs": "the engine", "log_probs": "the trainer"}  # the fields, and the programs behind them
_STORAGES = frozenset({f"torch.{name}" for name in (*DTYPE_OF_STORAGE, *ITEMSIZE)})
# Tensors, arrays, and the classes of other fields of samples: none of them runs code.
_CLASSES = re.compile(
    r"torch\.(Size|_utils\._rebuild_tensor_v2|_utils\._rebuild_parameter|storage\.UntypedStorage)"
    r"|collections\.(OrderedDict|defaultdict)|builtins\.(set|frozenset)|_codecs\.encode"
    r"|numpy\.(ndarray|dtype)|numpy\.(_core|core)\.multiarray\.(_reconstruct|scalar)"
    # A status is pickled as a call of its class or, by Python 3.11.2, as an attribute of it.
    r"|(slime|miles)\.utils\.types\.(Sample(\.(Status(\.[A-Z]+)?|SpecInfo|PrefixCacheInfo))?|AdapterRef|RewardSpec)"
    r"|copyreg\._reconstructor|builtins\.object"
)
_MAX_TEMPERATURE = 2  # the maximum of chat endpoints; in metadata more is another temperature
_SAME = "record the file again with --save-debug-rollout-data"


@dataclass(frozen=True)
class RecordedSample:
    index: int  # its place in the file
    tokens: Sequence[int]  # of the prompt, then of the response
    response: int  # the number of the response's tokens
    log_probs: Mapping[str, Sequence[float]]  # natural logarithms of the response's tokens, by key of SIDES
    mask: Sequence[bool]  # the response's tokens of the model itself, not of a tool
    prompt: str | Sequence[Mapping[str, Any]] | None = None  # text or messages
    options: Mapping[str, Any] = field(default_factory=dict)  # for the chat template
    versions: tuple[str, ...] = ()  # of the engine's weights, by its count of updates
    temperature: float | None = None  # or None if it is not recorded
    skip_reason: str = ""  # why its log-probabilities cannot be computed from its tokens
    clipped: bool = False  # sampled with top-p: its log-probabilities may be those among the remaining tokens

    @property
    def prompt_tokens(self) -> Sequence[int]:
        return self.tokens[: len(self.tokens) - self.response]


@dataclass(frozen=True)
class Recording:
    """All samples of a file. `rollout`: the number of the rollout, if the file has it."""

    path: Path
    samples: Sequence[RecordedSample]
    rollout: int | None = None

    @property
    def sides(self) -> Sequence[str]:
        return [side for side in SIDES if any(side in one.log_probs for one in self.samples)]

    @property
    def versions(self) -> Sequence[str]:
        return list(dict.fromkeys(version for one in self.samples for version in one.versions))


def read_recording(path: Path) -> Recording:
    """Reads the file. Raises CkptkitError for another kind of file, or if its lists do not match in length."""
    file = SavedFile(path, lambda kind: kind in _STORAGES or _CLASSES.fullmatch(kind) is not None)
    content = file.content
    if not isinstance(content, dict):
        raise CkptkitError(f"{path} contains a {type(content).__name__} instead of samples", _SAME)
    samples = [_sample(file, index, row) for index, row in enumerate(_rows(content, path))]
    if not samples:
        raise CkptkitError(f"{path} has no samples", "use the file of another rollout")
    number = content.get("rollout_id")
    return Recording(path, samples, number if type(number) is int else None)


def _rows(content: Mapping[Any, Any], path: Path) -> Sequence[Mapping[str, Any]]:
    """The fields of each sample; those of a trainer have names in the plural."""
    samples, columns = content.get("samples"), content.get("rollout_data")
    if isinstance(samples, list) and all(isinstance(one, dict) for one in samples):
        return samples
    if not isinstance(columns, dict) or not isinstance(lengths := columns.get("response_lengths"), list):
        raise CkptkitError(f"{path} has no list of samples", _SAME)
    if (ranks := content.get("cp_size", 1)) != 1:
        message = f"{path} has only a part of each response, since the trainer has {ranks} context parallel ranks"
        raise CkptkitError(message, "use a file of --save-debug-rollout-data")
    complete = {key: one for key, one in columns.items() if isinstance(one, list) and len(one) == len(lengths)}
    return [{key: column[index] for key, column in complete.items()} for index in range(len(lengths))]


def _sample(file: SavedFile, index: int, row: Mapping[str, Any]) -> RecordedSample:
    where = f"{file.path}: sample {index}"
    tokens = _numbers(file, where, "tokens", row.get("tokens"), {int})
    response = row.get("response_length", row.get("response_lengths"))
    if type(response) is not int or not 0 <= response <= len(tokens):
        raise CkptkitError(f"{where} has {len(tokens)} tokens, but response_length is {response!r:.40}", _SAME)
    lists = {}
    for key, value in {"loss_mask": row.get("loss_masks"), **row}.items():
        if key in ("loss_mask", *SIDES) and value is not None:
            lists[key] = _numbers(file, where, key, value, {int, float, bool})
            if len(lists[key]) != response:
                raise CkptkitError(f"{where} has {response} response tokens, but {len(lists[key])} {key}", _SAME)
    metadata, given = _object(row.get("metadata")), _object(row.get("apply_chat_template_kwargs"))
    options = {**given, "tools": metadata["tools"]} if isinstance(metadata.get("tools"), list) else given
    return RecordedSample(
        index,
        tokens,
        response,
        {side: lists[side] for side in SIDES if side in lists},
        [value != 0 for value in lists.get("loss_mask", [1] * response)],
        _prompt(row.get("prompt"), options),
        options,
        tuple(map(str, versions)) if isinstance(versions := row.get("weight_versions"), list) else (),
        _temperature(metadata),
        _skip_reason(row),
        row.get("rollout_top_p_token_ids") is not None,
    )


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _numbers(file: SavedFile, where: str, name: str, value: Any, kinds: Set[type]) -> list[Any]:
    """A list of numbers or a tensor of one axis. Raises CkptkitError for anything else."""
    if isinstance(value, Record):
        value = file.read(file.tensor(value, f"{name} of sample")).tolist()
    odd = [one for one in value if type(one) not in kinds] if isinstance(value, list | tuple) else [value]
    if odd:
        wanted = "numbers" if float in kinds else "whole numbers"
        raise CkptkitError(f"{where}: {name} is not a list of {wanted}, but has {odd[0]!r:.60}", _SAME)
    return list(value)


def _prompt(value: Any, options: Mapping[str, Any]) -> str | Sequence[Mapping[str, Any]] | None:
    """Text or messages, or None for neither, and if they or the template's options are not plain data."""
    messages = isinstance(value, list) and all(isinstance(one, dict) and "role" in one for one in value)
    try:
        json.dumps([value, options])
    except (TypeError, ValueError, RecursionError):
        return None
    return value if value and (isinstance(value, str) or messages) else None


def _temperature(metadata: Mapping[str, Any]) -> float | None:
    """The temperature in the metadata of custom rollout functions; slime and miles themselves record none."""
    entries: list[Any] = [one.get("temperature") for one in (metadata, _object(metadata.get("sampling_params")))]
    valid = [one for one in entries if type(one) in (int, float) and 0 <= one <= _MAX_TEMPERATURE]
    # SGLang does not scale the log-probabilities of a greedy choice.
    return float(valid[0] or 1) if valid else None


def _skip_reason(row: Mapping[str, Any]) -> str:
    media = _object(row.get("multimodal_inputs"))
    if row.get("multimodal_train_inputs") or any(one is not None for one in media.values()):
        return "it has images or other media"
    return "a LoRA adapter answered" if row.get("adapter") is not None else ""
