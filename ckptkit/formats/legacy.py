"""The files of Megatron's legacy `torch` format: the state of every rank, with the names of its modules.

`iter_N/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` has the training arguments and a state dict of the model chunks of
tensor parallel rank TT, pipeline stage PPP and expert parallel rank EEE. PPP and EEE appear only if there are several.
Source: Megatron-LM `training/checkpointing.py` (`get_checkpoint_name`, `save_checkpoint`, `generate_state_dict`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError, DamagedError, MissingError
from ckptkit.core.specs import Sizes, long_name
from ckptkit.formats.detect import LEGACY_FILE, LEGACY_RANK
from ckptkit.formats.torch_save.records import is_bounded
from ckptkit.formats.torch_save.saved_file import SavedFile, SavedTensor

_EXTRA = "_extra_state"
_MAX_RANKS = 100_000  # ranks of a kind
_LEGACY_GROUPED = re.compile(r".*\.mlp\.experts\.weight[12]")


@dataclass(frozen=True)
class RankFile:
    """The file of one rank: its rank in each group, and the tensors of its model chunks by module name."""

    tp: int
    pp: int
    ep: int
    file: SavedFile
    chunks: tuple[Mapping[str, SavedTensor], ...]

    def __str__(self) -> str:
        return str(self.file.path)


class LegacyFiles:
    """All rank files of an iteration. Raises CkptkitError if one is missing, damaged or from another save."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = sorted(entry for entry in path.iterdir() if LEGACY_RANK.fullmatch(entry.name))
        first = SavedFile(found[0] / LEGACY_FILE)
        self.args = _args_of(first)
        self.sizes = _sizes_of(first)
        self._stamp = _stamp_of(first)
        self.ranks = tuple(
            self._rank(entry, first if index == 0 else SavedFile(entry / LEGACY_FILE))
            for index, entry in enumerate(found)
        )
        self._check_complete()

    def _rank(self, entry: Path, file: SavedFile) -> RankFile:
        for name, value in _stamp_of(file).items():
            if value != self._stamp[name]:
                first = min(other.name for other in self.path.iterdir() if LEGACY_RANK.fullmatch(other.name))
                message = f"{file.path} was saved with {name} {value}, but {first} with {self._stamp[name]}"
                raise DamagedError(message, "copy all files of one save again: two saves are mixed")
        tp, pp, ep = self._place(entry)
        chunks = tuple(_chunk(file, content) for content in _models(file))
        # The optimizer in the pickle may be large, and is not needed.
        file.forget()
        return RankFile(tp, pp, ep, file, chunks)

    def _place(self, entry: Path) -> tuple[int, int, int]:
        """Tensor, pipeline and expert parallel rank of a directory, which omits the latter two if of size 1."""
        numbers = [int(number) for number in entry.name.removeprefix("mp_rank_").split("_")]
        if len(numbers) == 1 + (self.sizes.pp > 1) + (self.sizes.ep > 1):
            pp = numbers[1] if self.sizes.pp > 1 else 0
            ep = numbers[-1] if self.sizes.ep > 1 else 0
            if numbers[0] < self.sizes.tp and pp < self.sizes.pp and ep < self.sizes.ep:
                return numbers[0], pp, ep
        message = f"{entry} is not a rank of {self.sizes} in the training arguments"
        raise DamagedError(message, "copy all files of one save again: two saves are mixed")

    def _check_complete(self) -> None:
        for pp in range(self.sizes.pp):
            found = {(rank.tp, rank.ep) for rank in self.ranks if rank.pp == pp}
            lost = [self._name(tp, pp, None) for tp in range(self.sizes.tp) if all(rank != tp for rank, _ in found)]
            experts = {(self.etp_rank(tp), ep) for tp, ep in found}
            required = itertools.product(range(self.sizes.ep), range(self.sizes.etp))
            lost += [self._name(None, pp, ep) for ep, etp in required if (etp, ep) not in experts]
            if lost:
                hint = f"copy all mp_rank directories of the run ({self.sizes})"
                raise MissingError(f"{self.path} lacks {', '.join(lost)}", hint)

    def _name(self, tp: int | None, pp: int, ep: int | None) -> str:
        parts = [f"{tp:02d}" if tp is not None else "TT"]
        parts += [f"{pp:03d}"] if self.sizes.pp > 1 else []
        parts += [f"{ep:03d}" if ep is not None else "EEE"] if self.sizes.ep > 1 else []
        return f"mp_rank_{'_'.join(parts)}"

    def etp_rank(self, tp_rank: int) -> int:
        """Rank in the experts' tensor parallel group; Megatron numbers a stage's ranks consecutively in both groups."""
        return tp_rank % self.sizes.etp


def _args_of(file: SavedFile) -> Mapping[str, Any]:
    stored = file.content.get("args") if isinstance(file.content, dict) else None
    if stored is None or not hasattr(stored, "__dict__"):
        hint = "save it with Megatron-LM, which stores these arguments: they determine the layers of a rank"
        raise DamagedError(f"{file.path} has no training arguments", hint)
    if not is_bounded(args := dict(vars(stored))):
        raise DamagedError(f"{file.path}: its training arguments are too many or nested too deeply")
    return args


def _size(file: SavedFile, args: Mapping[str, Any], name: str, default: int | None) -> int:
    value = args.get(name) if args.get(name) is not None else default
    if type(value) is not int or not 0 < value <= _MAX_RANKS:
        message = f"{file.path}: the training argument {name} is {value!r}, not 1 to {_MAX_RANKS}"
        raise CkptkitError(message, "copy this file again: it is damaged")
    return value


def _sizes_of(file: SavedFile) -> Sizes:
    """Parallel sizes with Megatron's defaults. Raises CkptkitError if file names do not distinguish the ranks."""
    args = _args_of(file)
    tp, pp = (_size(file, args, f"{kind}_model_parallel_size", None) for kind in ("tensor", "pipeline"))
    ep, etp = (_size(file, args, f"expert_{kind}_parallel_size", one) for kind, one in (("model", 1), ("tensor", tp)))
    if args.get("moe_extended_tp"):
        hint = "save it with a Megatron that has --expert-tensor-parallel-size"
        raise CkptkitError(f"{file.path}: --moe-extended-tp is not supported", hint, code="unsupported")
    sizes = Sizes(tp, pp, ep, etp)
    if tp % etp:
        message = f"{file.path}: {sizes}: ranks of different expert shards have one file name"
        raise CkptkitError(message, "save it with --ckpt-format torch_dist")
    return sizes


def _stamp_of(file: SavedFile) -> dict[str, Any]:
    """Values that all files of a save share. Raises CkptkitError unless q, k and v are in megatron-core's order."""
    args, content = _args_of(file), file.content
    if (version := content.get("checkpoint_version", 0)) != 3.0:
        hint = "save it with a Megatron-LM that writes 3.0: only there is the order of q, k and v known"
        raise CkptkitError(f"{file.path}: checkpoint_version {version} is not supported", hint, code="unsupported")
    stamp = {"iteration": content.get("iteration"), "num_layers": args.get("num_layers")}
    return {**stamp, "parallel sizes": str(_sizes_of(file))}


def _models(file: SavedFile) -> list[Mapping[str, Any]]:
    """The state dict of each model chunk: under `model`, or `model0`, `model1` and so on."""
    found = {key for key in file.content if re.fullmatch(r"model\d*", str(key))}
    names = ["model"] if "model" in found else [f"model{index}" for index in range(len(found))]
    if not found or found != set(names) or not all(isinstance(file.content[name], dict) for name in names):
        hint = "copy this file again: it should contain `model`, or `model0`, `model1` and so on"
        raise CkptkitError(f"{file.path} contains {', '.join(sorted(found)) or 'no model'}", hint)
    return [file.content[name] for name in names]


def _chunk(file: SavedFile, content: Mapping[str, Any]) -> dict[str, SavedTensor]:
    tensors = {}
    if problem := long_name(map(str, content)):
        raise DamagedError(f"{file.path} has {problem}")
    for name, value in content.items():
        if isinstance(value, dict):
            message = f"{file.path}: {name} is a dict, so the model is older than megatron-core"
            raise CkptkitError(message, "convert it with Megatron-LM's tools/checkpoint first")
        if _LEGACY_GROUPED.fullmatch(name):
            message = f"{file.path}: {name} contains all experts of a rank (GroupedMLP)"
            raise CkptkitError(message, "save it with --ckpt-format torch_dist")
        if not name.endswith(_EXTRA):
            tensors[name] = file.tensor(value, name)
    return tensors
