"""CK401 to CK404: the tensors that real Megatron requests and loads, rank by rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ckptkit.converters.planner import dims_of, rules_for_names
from ckptkit.core.specs import fold, ranges
from ckptkit.formats.torch_dist.names import norm_alias
from ckptkit.formats.torch_dist.reader import NOT_WEIGHTS, TorchDistCheckpoint, tiling_problem
from ckptkit.verify.core.check import CannotCheck, CheckResult, Issue, Subject, check, once, only_if
from ckptkit.verify.evidence.expected import config_of
from ckptkit.verify.evidence.folding import by_key, chunk_ranges, group_by_pattern, layer_of, layers_of
from ckptkit.verify.evidence.moved import AGAIN, Stages, explain_moves
from ckptkit.verify.witnesses.megatron.job import Box, RankReport, TensorSeen
from ckptkit.verify.witnesses.megatron.run import MegatronRun, run_megatron, staged_dims

Seen = tuple[int, TensorSeen]
_OF_VOCABULARY = frozenset({"embedding.word_embeddings.weight", "output_layer.weight"})
_all_ranks = only_if(lambda subject: not subject.options.ranks, "--ranks selects only some ranks")


@once
def stages_held(subject: Subject) -> Stages:
    """The layers of every chunk of every pipeline stage in Megatron; empty for a single stage."""
    held = {report.pp: report.layers for report in require_finished(subject).reports}
    return Stages(staged_dims(subject).layers, held if len(held) > 1 else {})


def _names(subject: Subject) -> list[str]:
    """The tensors that the config promises, under the names of the checkpoint's class."""
    return [rule.megatron for rule in rules_for_names(config_of(subject), subject.checkpoint.specs)]


def require_finished(subject: Subject) -> MegatronRun:
    """The run of Megatron. Raises CannotCheck if Megatron did not run or did not load."""
    run = run_megatron(subject)
    if run.unable:
        raise CannotCheck(run.unable)
    if run.failures or run.not_found:
        raise CannotCheck("a rank did not finish loading", "CK401")
    return run


@check("CK401", stage="megatron", needs=("megatron",))
def strict_load(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every rank starts, the keys that it requests are on disk, and every key on disk is requested."""
    run = run_megatron(subject)
    if run.unable:
        raise CannotCheck(run.unable)
    versions = ", ".join(sorted({report.version for report in run.reports})) or "?"
    ranks = f"{run.sizes.world} rank(s)"
    if subject.options.ranks:
        ranks = f"ranks {ranges(subject.options.ranks).strip('{}')} of {run.sizes.world}"
    model = "HybridModel" if subject.megatron_files.hybrid else "GPTModel"
    result.facts["megatron"] = [f"megatron-core {versions}, {model}, {run.sizes}, {ranks}, {run.device}"]
    if run.not_found:
        hint = "correct the tracker, from which a trainer takes the iteration, or verify the iteration that it names"
        yield Issue("a tracker that names this checkpoint", run.not_found, hint)
    for error in dict.fromkeys(run.failures.values()):
        failed = format_ranks(rank for rank, found in run.failures.items() if found == error)
        hint = "fix the cause of Megatron's error, at which training would stop too"
        yield Issue("every rank loads the checkpoint", error, hint, rank=failed)
    for report in run.reports:
        result.tensors_compared += report.requested
    if renamed := {key for report in run.reports for key in report.renamed}:
        saved = f"norms have the names of Transformer Engine's layers, as in training ({fold(sorted(renamed))[0]})"
        result.note(f"CK401: {saved}; Megatron's local spec, which ran here, uses other names, which were mapped")
    # For a key that is not on disk, load_state_dict refuses the parameter too: one finding is enough.
    requests = by_key((name, report.rank) for report in run.reports for name in report.unexpected or report.refused)
    hint = "compare the launch arguments with the release: Megatron would keep random values in this parameter"
    for names in group_by_pattern(requests):
        by = format_ranks(rank for name in names for rank in requests[name])
        yield Issue("stored, because Megatron requests it", "not stored", hint, names=names, rank=by)
    if subject.options.ranks:
        result.note(f"--ranks: only {ranks} are checked")
        return
    yield from _not_requested(run.reports, set(_names(subject)))


def _not_requested(reports: Sequence[RankReport], names: Container[str]) -> Iterator[Issue]:
    missing = set(reports[0].missing) if reports else set()
    # A norm with two names is requested under one of them.
    alias = {key: norm_alias(key, names) for key in sorted(missing) if not NOT_WEIGHTS.fullmatch(key)}
    left = [key for key, other in alias.items() if other is None or other in missing]
    hint = "compare config.json with the release: Megatron builds no such parameter from it (see also CK104)"
    yield Issue("a tensor that a rank requests", "no rank requests this tensor", hint, names=left)


@check("CK402", stage="megatron", needs=("megatron",), explained_by=("CK202",))
def right_slices(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every parameter and persistent buffer has the bits of its slice of the source, or of the files."""
    run = require_finished(subject)
    seen = [(report.rank, tensor) for report in run.reports for tensor in report.tensors]
    for _, tensor in seen:
        result.compared(nbytes=tensor.nbytes)
    yield from wrong_slices(run, subject.source_path or subject.path, stages_held(subject))
    # Megatron updates biases of routers in float32.
    narrow = [one for one in seen if one[1].name.endswith(".router.expert_bias") and one[1].dtype != "float32"]
    actual = f"Megatron holds it in {', '.join(sorted({tensor.dtype for _, tensor in narrow}))}"
    hint = "use a megatron-core that keeps these biases in float32, since rounded ones choose other experts"
    names = sorted({tensor.name for _, tensor in narrow})
    yield Issue("float32", actual, hint, names=names, rank=_ranks_of(names, narrow) if names else None)
    if subject.options.ranks:
        return
    held = {tensor.name for _, tensor in seen}
    lost = [name for name in _names(subject) if name not in held]
    yield Issue("loaded by at least one rank", "no rank has a parameter for it", names=lost)


@check("CK403", stage="megatron", needs=("megatron",))
def all_layers(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The pipeline stages have all layers, by Megatron's own numbers."""
    run = require_finished(subject)
    stages: dict[int, tuple[tuple[int, ...], ...]] = {}
    for report in run.reports:
        result.tensors_compared += sum(map(len, report.layers)) + sum(report.mtp)
        if stages.setdefault(report.pp, report.layers) != report.layers:
            expected, actual = (f"layers {chunk_ranges(layers)}" for layers in (stages[report.pp], report.layers))
            hint = "report this: ranks of one pipeline stage must hold the same layers"
            yield Issue(expected, actual, hint, rank=format_ranks([report.rank]))
    predicted = {report.pp: sum(report.mtp) for report in run.reports}
    facts = result.facts["pipeline stages"] = list[str]()
    for stage, chunks in sorted(stages.items()):
        layers = f"layers {chunk_ranges(chunks)}" if any(chunks) else "no layers"
        more = f", {predicted[stage]} for multi-token prediction" if predicted[stage] else ""
        facts.append(f"pp rank {stage}: {layers}{more}")
    held = sorted(layer for chunks in stages.values() for chunk in chunks for layer in chunk)
    count = staged_dims(subject).layers
    if held != list(range(count)) and not subject.options.ranks:
        yield Issue(f"layers 0..{count - 1}, each once", f"layers {', '.join(map(str, held))}")


@check("CK404", stage="megatron", needs=("megatron",), applies_to=_all_ranks)
def all_regions(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The boxes that ranks read cover each tensor, without rows that pad the vocabulary."""
    reports = require_finished(subject).reports
    asked = by_key((key, box) for report in reports for key, boxes in report.asked.items() for box in boxes)
    for key, shape in _shapes(subject).items():
        if key not in asked:
            continue  # CK401 reports it
        result.compared()
        # Replicas read boxes of another rank, and a rank may have only padding.
        owned = {_inside(box, shape) for box in asked[key] if box.main}
        if problem := tiling_problem(shape, [box for box in owned if math.prod(box[1])]):
            hint = "report this with the parallel sizes: these weights would not be trained, or not saved"
            yield Issue("each element read by one rank, which saves it", problem, hint, names=[key])


def _inside(box: Box, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of the part of a box inside a tensor of this shape."""
    ends = [min(start + size, limit) for start, size, limit in zip(box.offsets, box.sizes, shape, strict=True)]
    starts = tuple(map(min, box.offsets, ends))
    return starts, tuple(end - start for start, end in zip(starts, ends, strict=True))


def _shapes(subject: Subject) -> Mapping[str, tuple[int, ...]]:
    """The shape of each weight on disk, without rows that pad the vocabulary."""
    stored = TorchDistCheckpoint(subject.location.path, hf=subject.hf_path).metadata.tensors
    vocabulary = dims_of(config_of(subject)).vocab
    shapes = {key: tensor.shape for key, tensor in stored.items() if not NOT_WEIGHTS.fullmatch(key)}
    return shapes | {key: (min(shapes[key][0], vocabulary), *shapes[key][1:]) for key in _OF_VOCABULARY & shapes.keys()}


def format_ranks(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0..1`."""
    distinct = set(ranks)
    return f"rank{'s' * (len(distinct) > 1)} {ranges(distinct).strip('{}')}"


def wrong_slices(run: MegatronRun, where: Path, stages: Stages) -> Iterator[Issue]:
    """Every parameter that differs from its slice of `where`: complete layers and experts first, then tensors."""
    seen = ((report.rank, tensor) for report in run.reports for tensor in report.tensors)
    by_verdict = defaultdict(list, by_key((str(one[1].verdict), one) for one in seen))
    lost = "compare config.json with the release: the weights belong to another model"
    random = "convert again: Megatron would train on random values"
    for verdict, expected, actual, hint in (
        ("unknown", f"a tensor of {where} to compare with", "missing", lost),
        ("unwritten", "values that loading wrote", "loading wrote no values", random),
    ):
        for names in group_by_pattern(_by_name(by_verdict[verdict])):
            yield Issue(expected, actual, hint, names=names, rank=_ranks_of(names, by_verdict[verdict]))
    differing = by_verdict["differs"]
    origins = _find_origins(differing)
    for move in explain_moves(origins, stages):
        expected = "each layer's own values" if move.is_layers else f"the rank's slice of {where}"
        ranks = _ranks_of(move.names, differing)
        yield Issue(expected, move.text, move.hint, names=move.names, rank=ranks, as_one=True)
    # Tensors without the values of another tensor, grouped by diagnosis.
    left = (one for one in differing if origins.get(one[1].name, "") is None)
    for diagnosis, pairs in by_key((one[1].diagnosis, one) for one in left).items():
        by_name = _by_name(pairs)
        for names in group_by_pattern(by_name):
            worst = max((by_name[name] for name in names), key=lambda tensor: (tensor.differing, tensor.name))
            count = f"{worst.differing} of {worst.elements} elements differ in {worst.name}"
            count += f", by up to {worst.largest:.3g}"
            actual = f"{diagnosis} ({count})" if diagnosis else count
            yield Issue(f"the rank's slice of {where}", actual, AGAIN, names=names, rank=_ranks_of(names, pairs))


def _by_name(seen: Iterable[Seen]) -> dict[str, TensorSeen]:
    """The largest difference of each tensor over all ranks."""
    worst: dict[str, TensorSeen] = {}
    for _, tensor in seen:
        if tensor.name not in worst or tensor.differing > worst[tensor.name].differing:
            worst[tensor.name] = tensor
    return worst


def _ranks_of(names: Iterable[str], seen: Iterable[Seen]) -> str:
    chosen = set(names)
    return format_ranks(rank for rank, tensor in seen if tensor.name in chosen)


def _find_origins(seen: Sequence[Seen]) -> dict[str, str | None]:
    """The tensor with the values of each wrong one, or None; if several layers fit, the one that fits all tensors."""
    origins: dict[str, set[str]] = {}
    for _, tensor in seen:
        origins[tensor.name] = origins.get(tensor.name, set(tensor.origins)) & set(tensor.origins)
    layers: dict[int, set[int]] = {}
    for name, found in origins.items():
        if (layer := layer_of(name)) is not None and found:
            possible = set(layers_of(found))
            layers[layer] = layers.get(layer, possible) & possible
    for name, found in origins.items():
        if len(found) > 1 and (layer := layer_of(name)) is not None:
            origins[name] = {origin for origin in found if layer_of(origin) in layers[layer]}
    return {name: next(iter(found)) if len(found) == 1 else None for name, found in origins.items()}
