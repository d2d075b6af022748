"""Rejects a torch_dist checkpoint if its pickles name classes or functions that megatron-core and torch do not write.

torch and Megatron unpickle `.metadata`, `common.pt` and saved objects without restriction, which runs the named code.
So their pickles are first read here, without running anything.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ckptkit.core.dtypes import ITEMSIZE, STORAGE_CLASS
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.formats.torch_dist.reader import FOREIGN_HINT, StoredMetadata, read_metadata
from ckptkit.formats.torch_save.blob import Blob
from ckptkit.formats.torch_save.records import Record

_DCP = "torch.distributed.checkpoint."
_STRATEGY = "megatron.core.dist_checkpointing.strategies.torch."
# Source: torch `distributed/checkpoint/metadata.py`, `filesystem.py` and `planner.py`, and megatron-core 0.15's
# `dist_checkpointing/strategies/torch.py`. megatron-core adds the plans of all ranks to the metadata, and some releases
# of torch write them (if `FileSystemWriter.finish` does not copy the metadata).
_METADATA = {
    *(f"{_DCP}metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *(f"{_DCP}metadata.{name}" for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata")),
    *(f"{_DCP}metadata._MEM_FORMAT_ENCODING", f"{_DCP}filesystem._StorageInfo"),
    *(f"{_DCP}planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    *(f"{_DCP}planner.BytesIOWriteData", f"{_STRATEGY}MCoreMetadata", f"{_STRATEGY}MCoreSavePlan"),
    *("torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath"),
    *(f"torch.{dtype}" for dtype in ITEMSIZE),
}
_METADATA_ENUMS = {f"{_DCP}metadata._MEM_FORMAT_ENCODING", f"{_DCP}planner.WriteItemType"}
_ENUMS = {
    "megatron.core.enums.ModelType",
    *(f"megatron.core.rerun_state_machine.{name}" for name in ("RerunDiagnostic", "RerunMode", "RerunState")),
    *(
        f"megatron.core.transformer.enums.{name}"
        for name in ("AttnBackend", "CudaGraphModule", "CudaGraphScope", "InferenceCudaGraphScope", "AttnMaskType")
    ),
    "megatron.core.transformer.enums.LayerType",
}
_METHODS = {*dir(type), *dir(str)}  # attributes of enum classes that are not members; some enums are also strings
# Source: `SAFE_GLOBALS` in megatron-core's `safe_globals.py`, torch's pickle of a tensor, numpy's of a number, and the
# data class in the arguments of slime and miles (`utils/eval_config.py`). Python pickles a signal by the name of its
# class or, in 3.10 and 3.11.2, by its member.
_OBJECTS = {
    *("argparse.Namespace", "types.SimpleNamespace", "pathlib.PosixPath", "signal.Signals", "_io.BytesIO"),
    *(f"signal.{one.name}" for one in signal.Signals),
    *("collections.OrderedDict", "collections.defaultdict", "builtins.dict", "builtins.set", "builtins.bytes"),
    *("torch.Size", "torch.device", "torch._utils._rebuild_tensor_v2", "torch.ByteStorage"),
    *(f"torch.{dtype}" for dtype in ITEMSIZE),
    *(f"torch.{name}" for name in STORAGE_CLASS.values()),
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *("numpy.ndarray", "numpy.dtype", "numpy.dtypes.UInt32DType", "_codecs.encode"),
    *_ENUMS,
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.transformer.pipeline_parallel_layer_layout.PipelineParallelLayerLayout",
    *("slime.utils.eval_config.EvalDatasetConfig", "miles.utils.eval_config.EvalDatasetConfig"),
}
_EXTRA_STATE = "._extra_state"


def refuse_foreign_names(path: Path, metadata: StoredMetadata | None = None) -> None:
    """Raises UnsupportedError if a pickle in the torch_dist directory `path`, maybe a sound one, names anything else.

    Raises CkptkitError for a damaged pickle. `metadata`: its `.metadata`, if already read. Also checks the bytes in an
    `_extra_state`, which Transformer Engine unpickles.
    """
    metadata = read_metadata(path) if metadata is None else metadata
    if (found := _foreign_in_metadata(path, metadata)) is not None:
        raise found[1]
    for key, blob in _pickles(path, metadata).items():
        state = blob.object(_is_object)
        if _EXTRA_STATE in key and not _is_empty(state):
            message = f"{blob}: {key} contains bytes that Transformer Engine would unpickle"
            raise UnsupportedError(message, "save it without FP8 state")


def foreign_name(path: Path, metadata: StoredMetadata) -> tuple[str, UnsupportedError] | None:
    """The first name that `refuse_foreign_names` rejects, and its error. Ignores damaged pickles."""
    if (found := _foreign_in_metadata(path, metadata)) is not None:
        return found
    for blob in _pickles(path, metadata).values():
        try:
            blob.object(_is_object)
        except UnsupportedError as error:
            return getattr(error.__cause__, "kind", str(blob)), error
        except CkptkitError:  # other checks report missing, truncated or damaged files
            continue
    return None


def _foreign_in_metadata(path: Path, metadata: StoredMetadata) -> tuple[str, UnsupportedError] | None:
    """The first name in `.metadata` that torch does not write, and the error."""
    foreign = sorted(name for name in metadata.names - _METADATA if not _is_member(name, _METADATA_ENUMS))
    if not foreign:
        return None
    message = f"{path / '.metadata'} contains {foreign[0]}, which torch does not write"
    return foreign[0], UnsupportedError(message, FOREIGN_HINT)


def _pickles(path: Path, metadata: StoredMetadata) -> Mapping[str, Blob]:
    """Every pickled object by key, and common.pt by its name."""
    common = path / "common.pt"
    file = {common.name: Blob(common, 0, common.stat().st_size)} if common.exists() else {}
    return {**metadata.objects, **file}


def _is_object(name: str) -> bool:
    return name in _OBJECTS or _is_member(name, _ENUMS)


def _is_member(name: str, enums: Collection[str]) -> bool:
    """Whether this names a member of one of these enums, like in pickles of Python 3.11.2."""
    holder, _, member = name.rpartition(".")
    return holder in enums and not member.startswith("_") and member not in _METHODS


def _is_empty(state: Any) -> bool:
    """Whether an extra state has no bytes to unpickle."""
    # megatron-core stores the state of a rank in a list of one; Transformer Engine stores streams and tensors of bytes.
    if isinstance(state, list):
        return len(state) <= 1 and not any(isinstance(one, list) or not _is_empty(one) for one in state)
    if isinstance(state, Record) and state.kind == "_io.BytesIO":
        content = state.state[0] if isinstance(state.state, tuple) and state.state else b""
        # Protocol 2 pickles empty bytes as a call of `bytes` without arguments.
        no_bytes = isinstance(content, Record) and content.kind == "builtins.bytes" and not content.args
        return not state.args and (not content or no_bytes)
    if isinstance(state, Record) and state.kind == "torch._utils._rebuild_tensor_v2":
        return len(state.args) > 2 and isinstance(state.args[2], tuple) and 0 in state.args[2]
    return not state
