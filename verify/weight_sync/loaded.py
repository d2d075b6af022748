"""Compares the parameters of a rank of a trainer with the checkpoint that its options name.

Uncut parameters (norms, routers and their biases) are compared bit for bit, if possible by digests of `ckptkit.json`. A
few cut ones are compared with the slice that this rank must have (`ckptkit.verify.witnesses.megatron.slices`).
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ckptkit.converters.megatron.module_names import CUT_IN_LOCAL_SPEC, global_name
from ckptkit.converters.open import open_megatron
from ckptkit.converters.ops.basic import Copy
from ckptkit.converters.planner import Rule, dims_of, rules_for_names, to_megatron
from ckptkit.converters.stored import adapt_config
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import dtype_name
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import summarize
from ckptkit.formats.detect import MANIFEST, TRACKER, Location, locate
from ckptkit.storage.digest import TensorDigest
from ckptkit.transfer.manifest import read_manifest
from ckptkit.verify.evidence.folding import pattern_of
from ckptkit.verify.evidence.plain import plain
from ckptkit.verify.weight_sync.messages import job_rank

if TYPE_CHECKING:
    from ckptkit.verify.witnesses.megatron.job import TensorSeen

PARAMETERS = "CKPTKIT_COMPARED_PARAMETERS"  # the environment variable with the number of cut parameters
_PARAMETERS = 16
_SMALL = 1 << 22  # elements up to which an uncut parameter is always compared
_MAX_BYTES = 1 << 28  # bytes of a tensor on disk up to which it is read for a slice
_SOURCES = {"": "load", "ref_": "ref_load", "teacher_": "opd_teacher_load"}  # options by the prefix of the computation


@dataclass(frozen=True)
class LoadedComparison:
    """The equal parameters, and the skipped ones by reason."""

    path: Path
    digests: Sequence[str]  # equal to digests of the manifest
    tensors: Sequence[str]  # equal to weights on disk
    skipped: Mapping[str, Sequence[str]]

    def __str__(self) -> str:
        equal = [f"{len(self.digests)} parameters by {MANIFEST}"] if self.digests else []
        equal += [f"{len(self.tensors)} by the weights on disk: {summarize(self.tensors)}"] if self.tensors else []
        skipped = [f"{len(names)} that {reason}: {summarize(names)}" for reason, names in self.skipped.items() if names]
        return f"equal to {self.path}: {', '.join(equal) or 'nothing'}; not compared: {', '.join(skipped) or 'nothing'}"


class DiffersError(CkptkitError):
    """A parameter differs from the checkpoint."""

    code = "mismatch"


def locate_loaded(args: Namespace, prefix: str) -> Location:
    """The checkpoint of `--load`, `--ref-load` or `--opd-teacher-load`. Raises CkptkitError without any."""
    option = _SOURCES.get(prefix)
    path = getattr(args, option, None) if option else None
    if option == "load" and not path:
        option, path = "ref_load", getattr(args, "ref_load", None)
    if not option or not path:
        raise CkptkitError(f"no option has the weights of {prefix or 'the actor'}", "pass --load")
    step = getattr(args, option.removesuffix("load") + "ckpt_step", None)
    tracker = Path(path) / TRACKER
    # Megatron ignores the step if the tracker names `release`, and ignores step 0.
    if step and tracker.exists() and tracker.read_text(errors="replace").strip() != "release":
        return replace(locate(Path(path) / f"iter_{int(step):07d}"), root=Path(path).absolute())
    return locate(path)


def parameters_asked_for() -> int | None:
    """The number of cut parameters to compare, or None for all. Raises CkptkitError for another value."""
    value = os.environ.get(PARAMETERS, str(_PARAMETERS))
    if value != "all" and not value.isdecimal():
        raise CkptkitError(f"{PARAMETERS} is {value!r}", "set it to a number of parameters, or to `all`")
    return None if value == "all" else int(value)


def compare_loaded(
    location: Location, hf: str | None, model: Sequence[torch.nn.Module], parameters: int | None
) -> LoadedComparison:
    """Compares a rank with a checkpoint (config in `hf`), at most `parameters` cut ones. Raises DiffersError."""
    from ckptkit.verify.witnesses.megatron.slices import Position, compare_all

    path = location.path
    reference: Checkpoint = (
        to_megatron(plain(path), str(path)) if location.kind == "hf" else open_megatron(location, hf)
    )
    config = adapt_config(reference.config, reference.specs)
    rules = {rule.megatron: rule for rule in rules_for_names(config, reference.specs)}
    skipped: dict[str, list[str]] = defaultdict(list)
    at = Position.here(dims_of(config).experts)
    held = dict(_local_tensors(model, at.experts, rules, reference.specs, skipped))
    names = {local: name for local, (name, _) in held.items()}

    def is_uncut(name: str, tensor: Tensor) -> bool:
        has_shape = tuple(tensor.shape) == reference.specs[name].shape and tensor.numel() <= _SMALL
        return has_shape and ".experts." not in name and not rules[name].mapping.vocab

    uncut = [local for local, (name, tensor) in held.items() if is_uncut(name, tensor)]
    digests = _digests(location, rules, skipped)
    # If shape or dtype differ from those of the digest, the weights on disk are cast and compared.
    specs = {local: (dtype_name(held[local][1].dtype), tuple(held[local][1].shape)) for local in uncut}
    listed = {local: digest for local in uncut if (digest := digests.get(names[local]))}
    known = {local: one for local, one in listed.items() if (one.dtype, one.shape) == specs[local]}
    wrong = []
    for local, digest in known.items():
        if (actual := TensorDigest.of(held[local][1].contiguous().cpu())) != digest:
            other = next((f": it has the values of {name}" for name, one in digests.items() if one == actual), "")
            wrong.append(f"{local} does not have the values of {names[local]} of {path}{other}")
    cut = _select_cut([local for local in held if local not in uncut], names, reference, parameters, skipped)
    tensors = {local: held[local][1] for local in (*uncut, *cut) if local not in known}
    in_local_spec = ((name, tensor) for name, tensor in held.values() if CUT_IN_LOCAL_SPEC.fullmatch(name))
    at = replace(at, local_spec=any(tuple(one.shape) != reference.specs[name].shape for name, one in in_local_spec))
    seen = list(compare_all(tensors, names.__getitem__, rules, reference, at))
    different = (one for one in seen if one.verdict != "equal")
    wrong += [f"{one.local} does not have the values of {one.name} of {path}{_describe(one)}" for one in different]
    if wrong:
        hint = f"check how Megatron loads the checkpoint: `ckptkit verify {path} --against-megatron`"
        is_one_of_many = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        rank = f"rank {job_rank()}: " if is_one_of_many else ""
        raise DiffersError(f"{rank}{len(wrong)} parameter(s) differ from the checkpoint", hint, wrong)
    return LoadedComparison(path, list(known), [one.local for one in seen], skipped)


def _local_tensors(
    model: Sequence[torch.nn.Module],
    experts: range,
    rules: Mapping[str, Rule],
    specs: Collection[str],
    skipped: dict[str, list[str]],
) -> Iterator[tuple[str, tuple[str, Tensor]]]:
    """Yields local name, global name and value of each parameter and router bias."""
    from ckptkit.verify.witnesses.megatron.slices import layers_of_chunk

    for index, chunk in enumerate(model):
        core = chunk
        while not hasattr(core, "decoder") and hasattr(core, "module"):  # wrappers for gradients and precision
            core = core.module  # type: ignore[assignment]
        prefix = f"chunk {index}: " if len(model) > 1 else ""
        if not hasattr(core, "decoder"):
            skipped["belong to another model than a GPTModel"].append(f"{prefix}{type(core).__name__}")
            continue
        layers = layers_of_chunk(core)
        biases = ((name, one) for name, one in core.named_buffers() if name.endswith(".expert_bias"))
        for local, parameter in chain(core.named_parameters(), biases):
            name = global_name(local, layers, experts, rules)
            if name not in rules or name not in specs:
                skipped["the checkpoint does not have"].append(prefix + local)
            elif not parameter.is_floating_point() or parameter.element_size() == 1:
                skipped["are quantized or not floats"].append(prefix + local)
            else:
                yield prefix + local, (name, parameter.detach())


def _digests(location: Location, rules: Mapping[str, Rule], skipped: dict[str, list[str]]) -> dict[str, TensorDigest]:
    """The manifest's digests by Megatron's names; of an HF directory those of tensors that are copied unchanged."""
    path = location.root / MANIFEST
    if not path.exists():
        return {}
    try:
        tensors = read_manifest(path).tensors
    except CkptkitError as error:
        skipped[f"the manifest lists ({error.message})"].append(str(path))
        return {}
    if location.kind == "megatron":
        return dict(tensors)
    copied = {rule.megatron: next(iter(rule.hf)) for rule in rules.values() if type(rule.mapping.op) is Copy}
    return {name: tensors[hf] for name, hf in copied.items() if hf in tensors}


def _select_cut(
    local: Sequence[str],
    names: Mapping[str, str],
    reference: Checkpoint,
    parameters: int | None,
    skipped: dict[str, list[str]],
) -> list[str]:
    """Selects cut parameters of every kind in turn; ranks begin at different layers and experts."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for one in local:
        if reference.specs[names[one]].nbytes > _MAX_BYTES:
            skipped["are too large to read a slice"].append(one)
        else:
            kinds[pattern_of(names[one])].append(one)
    rank = job_rank()
    rotated = [[*some[first:], *some[:first]] for some in kinds.values() for first in [rank * 5 % len(some)]]
    order = [one for turn in zip_longest(*rotated) for one in turn if one is not None]
    selected = order[:parameters]
    skipped[f"exceed the {len(selected)} of {PARAMETERS}"] += order[len(selected) :]
    return selected


def _describe(seen: TensorSeen) -> str:
    numbers = f"{seen.differing} of {seen.elements} elements differ, by up to {seen.largest:.3g}"
    return f": it has those of {' or '.join(seen.origins)}" if seen.origins else f": {seen.diagnosis or numbers}"
