"""Compares what a rank of a trainer holds with the checkpoint that its options name, without moving the model.

What every rank holds whole (norms, routers and their biases) is compared bit for bit, by the digests of the
checkpoint's `ckptkit.json` where it has one. Of what is cut, a few parameters are compared with the slice that this
rank must hold, predicted from the checkpoint (`ckptkit.verify.witnesses.megatron.slices`).
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

PARAMETERS = "CKPTKIT_COMPARED_PARAMETERS"  # the variable that says how many cut parameters a rank compares
_PARAMETERS = 16
_WHOLE = 1 << 22  # elements up to which a parameter that is not cut is always compared
_MAX_BYTES = 1 << 28  # bytes of a tensor on disk up to which a slice of it is worth reading it
_SOURCES = {"": "load", "ref_": "ref_load", "teacher_": "opd_teacher_load"}  # by the prefix of what is computed


@dataclass(frozen=True)
class Looked:
    """What was equal: `digests` by the manifest, `tensors` with what is on disk. `skipped`: what was not looked at."""

    path: Path
    digests: Sequence[str]
    tensors: Sequence[str]
    skipped: Mapping[str, Sequence[str]]

    def __str__(self) -> str:
        equal = [f"{len(self.digests)} by {MANIFEST}"] if self.digests else []
        equal += [f"{len(self.tensors)} by the weights on disk: {summarize(self.tensors)}"] if self.tensors else []
        rest = [f"{len(names)} {why}: {summarize(names)}" for why, names in self.skipped.items() if names]
        return f"equal to {self.path}: {', '.join(equal) or 'nothing'}; not compared: {', '.join(rest) or 'nothing'}"


class DiffersError(CkptkitError):
    """A parameter does not hold what the checkpoint says."""

    code = "mismatch"


def locate_loaded(args: Namespace, prefix: str) -> Location:
    """The checkpoint that the model was loaded from, by `--load`, `--ref-load` or `--opd-teacher-load`.

    Raises CkptkitError where the options name none, and as `locate`.
    """
    option = _SOURCES.get(prefix)
    given = getattr(args, option, None) if option else None
    if option == "load" and not given:
        option, given = "ref_load", getattr(args, "ref_load", None)
    if not option or not given:
        raise CkptkitError(f"no option says where the weights of {prefix or 'the actor'} come from", "give --load")
    step = getattr(args, option.removesuffix("load") + "ckpt_step", None)
    tracker = Path(given) / TRACKER
    # Megatron loads `release` whatever the step is, and takes step 0 for none.
    if step and tracker.exists() and tracker.read_text(errors="replace").strip() != "release":
        return replace(locate(Path(given) / f"iter_{int(step):07d}"), root=Path(given).absolute())
    return locate(given)


def parameters_asked_for() -> int | None:
    """How many cut parameters a rank compares; None: all. Raises CkptkitError where the variable says neither."""
    given = os.environ.get(PARAMETERS, str(_PARAMETERS))
    if given != "all" and not given.isdecimal():
        raise CkptkitError(f"{PARAMETERS} is {given!r}", "give a number of parameters, or `all`")
    return None if given == "all" else int(given)


def compare_loaded(
    location: Location, hf: str | None, model: Sequence[torch.nn.Module], parameters: int | None
) -> Looked:
    """Compares the chunks of this rank with a checkpoint; `hf` gives the config of one that has none.

    Of cut parameters at most `parameters` are compared (None: all).

    Raises DiffersError naming every parameter that holds something else, and CkptkitError where it cannot be compared.
    """
    from ckptkit.verify.witnesses.megatron.slices import Position, compare_all

    reference: Checkpoint = (
        to_megatron(plain(location.path), str(location.path)) if location.is_hf else open_megatron(location, hf)
    )
    config = adapt_config(reference.config, reference.specs)
    rules = {rule.megatron: rule for rule in rules_for_names(config, reference.specs)}
    skipped: dict[str, list[str]] = defaultdict(list)
    at = Position.here(dims_of(config).experts)
    held = dict(_held(model, at.experts, rules, reference.specs, skipped))
    names = {local: name for local, (name, _) in held.items()}
    whole = [
        local
        for local, (name, tensor) in held.items()
        if tuple(tensor.shape) == reference.specs[name].shape
        and tensor.numel() <= _WHOLE
        and ".experts." not in name
        and not rules[name].mapping.vocab
    ]
    digests = _digests(location, rules, skipped)
    # Of another shape or dtype than the digest, the weights themselves are cast and compared.
    specs = {local: (dtype_name(held[local][1].dtype), tuple(held[local][1].shape)) for local in whole}
    known = {
        local: digest
        for local, spec in specs.items()
        if (digest := digests.get(names[local])) and (digest.dtype, digest.shape) == spec
    }
    wrong = []
    for local, digest in known.items():
        if (found := TensorDigest.of(held[local][1].contiguous().cpu())) != digest:
            other = next((f": it is {name}" for name, one in digests.items() if one == found), "")
            wrong.append(f"{local} is not {names[local]} of {location.path}{other}")
    cut = _chosen([local for local in held if local not in whole], names, reference, parameters, skipped)
    tensors = {local: held[local][1] for local in (*whole, *cut) if local not in known}
    is_local_spec = any(
        CUT_IN_LOCAL_SPEC.fullmatch(name) and tuple(tensor.shape) != reference.specs[name].shape
        for name, tensor in held.values()
    )
    at = replace(at, local_spec=is_local_spec)
    seen = list(compare_all(tensors, names.__getitem__, rules, reference, at))
    wrong += [f"{one.local} is not {one.name} of {location.path}{_how(one)}" for one in seen if one.verdict != "equal"]
    if wrong:
        hint = f"were these weights loaded as they are? `ckptkit verify {location.path} --against-megatron`"
        is_one_of_many = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        which = f"rank {job_rank()}: " if is_one_of_many else ""
        raise DiffersError(f"{which}{len(wrong)} parameter(s) are not those of the checkpoint", hint, wrong)
    return Looked(location.path, list(known), [one.local for one in seen], skipped)


def _held(
    model: Sequence[torch.nn.Module],
    experts: range,
    rules: Mapping[str, Rule],
    specs: Collection[str],
    skipped: dict[str, list[str]],
) -> Iterator[tuple[str, tuple[str, Tensor]]]:
    """Parameters and router biases by local name, each with its global name."""
    from ckptkit.verify.witnesses.megatron.slices import layers_of_chunk

    for index, chunk in enumerate(model):
        core = chunk
        while not hasattr(core, "decoder") and hasattr(core, "module"):  # wrappers of gradients and of precision
            core = core.module  # type: ignore[assignment]
        prefix = f"chunk {index}: " if len(model) > 1 else ""
        if not hasattr(core, "decoder"):
            skipped["of a model that is not a GPTModel"].append(f"{prefix}{type(core).__name__}")
            continue
        layers = layers_of_chunk(core)
        biases = ((name, one) for name, one in core.named_buffers() if name.endswith(".expert_bias"))
        for local, parameter in chain(core.named_parameters(), biases):
            name = global_name(local, layers, experts, rules)
            if name not in rules or name not in specs:
                skipped["of a name that the checkpoint lacks"].append(prefix + local)
            elif not parameter.is_floating_point() or parameter.element_size() == 1:
                skipped["not kept as plain numbers"].append(prefix + local)
            else:
                yield prefix + local, (name, parameter.detach())


def _digests(location: Location, rules: Mapping[str, Rule], skipped: dict[str, list[str]]) -> dict[str, TensorDigest]:
    """The manifest's digests by Megatron's names; of an HF directory those that Megatron takes as they are."""
    path = location.root / MANIFEST
    if not path.exists():
        return {}
    try:
        tensors = read_manifest(path).tensors
    except CkptkitError as error:
        skipped[f"manifest ({error.message})"].append(str(path))
        return {}
    if location.is_megatron:
        return dict(tensors)
    copied = {rule.megatron: next(iter(rule.hf)) for rule in rules.values() if type(rule.mapping.op) is Copy}
    return {name: tensors[hf] for name, hf in copied.items() if hf in tensors}


def _chosen(
    local: Sequence[str],
    names: Mapping[str, str],
    reference: Checkpoint,
    parameters: int | None,
    skipped: dict[str, list[str]],
) -> list[str]:
    """As many cut parameters as asked for, of every kind in turn; ranks begin at different layers and experts."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for one in local:
        if reference.specs[names[one]].nbytes > _MAX_BYTES:
            skipped["too large to read for a slice"].append(one)
        else:
            kinds[pattern_of(names[one])].append(one)
    rank = job_rank()
    turned = [[*found[first:], *found[:first]] for found in kinds.values() for first in [rank * 5 % len(found)]]
    order = [one for turn in zip_longest(*turned) for one in turn if one is not None]
    chosen = order[:parameters]
    skipped[f"beyond the {len(chosen)} that {PARAMETERS} allows"] += order[len(chosen) :]
    return chosen


def _how(seen: TensorSeen) -> str:
    if seen.origins:
        return f": it is {' or '.join(seen.origins)}"
    if seen.diagnosis:
        return f": {seen.diagnosis}"
    return f": {seen.differing} of {seen.elements} elements differ, by up to {seen.largest:.3g}"
