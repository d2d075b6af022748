"""CK405: whether the weight exporters of trainers name each rank's layers and experts as Megatron numbers them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ckptkit.core.specs import ranges
from converters.config.dims import ModelDims
from converters.megatron.exporters import EXPORTERS, Exporter
from converters.planner import dims_of
from verify.check import Tally, check
from verify.checks.witnesses.megatron import finished
from verify.checks.witnesses.slices import ranks_named
from verify.evidence.expected import config_of
from verify.evidence.folding import LAYER
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.witnesses.megatron.job import RankReport
from verify.witnesses.megatron.run import MegatronRun

_MTP = re.compile(r"mtp\.layers\.\d+\.(transformer_layer|mtp_model_layer)\.mlp\.experts\.")


@check(
    "CK405",
    "exporters name layers and experts as Megatron numbers them",
    stage="megatron",
    needs=("megatron",),
    rationale="A trainer that sends weights to an engine names them by a formula of its own. Where that is not "
    "Megatron's, the engine serves another layer's or expert's values, and nothing complains.",
    fix="Train with parallel sizes at which the two agree, or export through a bridge. If you use another exporter, "
    "the finding is not about your job.",
    unless=lambda subject: "no exporter of a trainer knows HybridModel's layers" if subject.holds_hybrid else None,
)
def exporters_agree(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Layer and expert numbers by slime's, miles' and verl's formulas against those of Megatron's ranks.

    What is wrong is a warning: which exporter a job uses is not known here.
    """
    run, dims = finished(subject), dims_of(config_of(subject))
    tally.facts["whose values the layers hold"] = list(_by_values(run.reports))
    for exporter in EXPORTERS:
        yield from _layers(exporter, run, dims, tally)
        yield from _mtp(exporter, run, dims)
        yield from _experts(exporter, run, dims)


def _stages(reports: Sequence[RankReport]) -> dict[int, list[RankReport]]:
    """The reports of each pipeline stage."""
    found: dict[int, list[RankReport]] = {}
    for report in reports:
        found.setdefault(report.pp, []).append(report)
    return found


def _by_values(reports: Sequence[RankReport]) -> Iterator[str]:
    """Whose values each stage's layers hold, layer by layer: a layer with values of none or of several is a `?`."""
    for stage, ranks in sorted(_stages(reports).items()):
        found: dict[int, set[int | None]] = {layer: set() for chunk in ranks[0].layers for layer in chunk}
        for tensor in (tensor for report in ranks for tensor in report.tensors):
            if match := LAYER.match(tensor.name):
                layer = int(match[1])
                origins = {int(other[1]) for name in tensor.origins if (other := LAYER.match(name))}
                found[layer] |= {layer} if tensor.verdict == "equal" else origins if len(origins) == 1 else {None}
        # Norms and biases may be equal in two layers: what differs tells.
        others = {layer: held - {layer} or held for layer, held in found.items()}
        text = ", ".join(
            str(next(iter(held))) if len(held) == 1 and None not in held else "?" for held in others.values()
        )
        same = all(held == {layer} for layer, held in others.items())
        yield f"pp rank {stage}: {'each layer its own' if same else f'those of layers {text}'}"


def _layers(exporter: Exporter, run: MegatronRun, dims: ModelDims, tally: Tally) -> Iterator[Issue]:
    pipeline = run.sizes.pipeline(dims)
    for stage, ranks in _stages(run.reports).items():
        for chunk, layers in enumerate(ranks[0].layers):
            tally.tensors += len(layers)
            first = exporter.first_layer(pipeline, stage, chunk)
            if layers and first != layers[0]:
                named = range(first, first + len(layers))
                yield _issue(
                    f"layers {ranges(layers)} of stage {stage}{f', chunk {chunk}' if pipeline.vpp > 1 else ''}",
                    f"{exporter.name} names them {ranges(named)}",
                    [f"decoder.layers.{layer}.*" for layer in layers],
                    ranks,
                )


def _mtp(exporter: Exporter, run: MegatronRun, dims: ModelDims) -> Iterator[Issue]:
    """Multi-token prediction layers, which Megatron counts from 0 wherever they are."""
    pipeline = run.sizes.pipeline(dims)
    for stage, ranks in _stages(run.reports).items() if dims.mtp_layers and exporter.mtp_shifted else ():
        held = any(tensor.name.startswith("mtp.") for report in ranks for tensor in report.tensors)
        shift = exporter.first_layer(pipeline, stage, len(ranks[0].layers) - 1)
        if held and shift:
            layers = range(dims.mtp_layers)
            yield _issue(
                f"mtp.layers.{ranges(layers)} of stage {stage}",
                f"{exporter.name} names them mtp.layers.{ranges(layer + shift for layer in layers)}",
                [f"mtp.layers.{layer}.*" for layer in layers],
                ranks,
            )


def _experts(exporter: Exporter, run: MegatronRun, dims: ModelDims) -> Iterator[Issue]:
    """Experts of ranks that do not hold the first."""
    ep = run.sizes.ep
    each = dims.experts // ep
    for rank in range(1, ep) if dims.experts else ():
        ranks = [report for report in run.reports if report.ep == rank]
        own = range(rank * each, (rank + 1) * each)
        named = [exporter.expert(dims.experts, ep, rank, local) for local in range(each)]
        what = f"experts {ranges(own)} of expert parallel rank {rank}"
        if named != list(own):
            yield _issue(what, f"{exporter.name} names them {ranges(named)}", ["decoder.layers.*.mlp.experts.*"], ranks)
        modules = {match[1] for report in ranks for one in report.tensors if (match := _MTP.match(one.local))}
        if unknown := modules - set(exporter.mtp_modules):
            actual = f"{exporter.name} leaves them {ranges(range(each))} in {unknown.pop()} of a prediction layer"
            version = ranks[0].version
            yield _issue(what, f"{actual} (its name in megatron-core {version})", ["mtp.layers.*.mlp.experts.*"], ranks)
        if dims.mlp_bias and not exporter.biases:
            actual = f"{exporter.name} leaves the numbers of their biases at {ranges(range(each))}"
            yield _issue(what, actual, ["decoder.layers.*.mlp.experts.*.bias"], ranks)


def _issue(expected: str, actual: str, names: Sequence[str], ranks: Sequence[RankReport]) -> Issue:
    hint = "only a job that exports with it is concerned: choose sizes at which it agrees, or compare what it sends"
    where = ranks_named(report.rank for report in ranks)
    return Issue(expected, actual, hint, names=names, rank=where, severity="warning", together=True)
