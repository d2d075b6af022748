"""CK401 to CK403: what real Megatron, loading the checkpoint rank by rank, asked for and then held."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence

from ckptkit.core.specs import fold, ranges
from ckptkit.formats.torch_dist.names import norm_alias
from ckptkit.formats.torch_dist.reader import NOT_WEIGHTS
from converters.planner import rules_in
from verify.check import Skip, Tally, Unable, check
from verify.checks.witnesses.slices import ranks_named, wrong_slices
from verify.evidence.expected import config_of
from verify.evidence.folding import chunk_ranges, group_by_pattern
from verify.evidence.moved import Stages
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.witnesses.megatron.job import RankReport, TensorSeen
from verify.witnesses.megatron.run import MegatronRun, run_megatron, staged_dims

_ROUTER_BIAS = ".router.expert_bias"


def stages_held(subject: Subject) -> Stages:
    """The pipeline that Megatron was loaded in: the layers of every chunk of every stage; none of a pipeline of one."""
    held = {report.pp: report.layers for report in finished(subject).reports}
    return Stages(staged_dims(subject).layers, held if len(held) > 1 else {})


def _names(subject: Subject) -> list[str]:
    """The tensors that the model has by its config, named for the class that the checkpoint holds."""
    return [rule.megatron for rule in rules_in(config_of(subject), subject.checkpoint.specs)]


def finished(subject: Subject) -> MegatronRun:
    """The run of Megatron. Raises Unable where Megatron could not be asked, Skip where it did not load."""
    run = subject.once(run_megatron)
    if run.unable:
        raise Unable(run.unable)
    if run.failures or run.not_found:
        raise Skip("a rank did not finish loading, see CK401")
    return run


@check(
    "CK401",
    "Megatron loads it strictly on every rank",
    stage="megatron",
    needs=("megatron",),
    rationale="A name that Megatron asks for and the checkpoint lacks stays random under the lenient modes that "
    "trainers run with.",
    fix="Convert again with this version. If Megatron's own last line names a shape, config.json describes another "
    "model.",
)
def strict_load(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every rank comes up, every key that it asks for is on disk, and every key on disk is asked for by some rank."""
    run = subject.once(run_megatron)
    if run.unable:
        raise Unable(run.unable)
    versions = ", ".join(sorted({report.version for report in run.reports})) or "?"
    ranks = f"{run.sizes.world} rank(s)"
    if subject.options.megatron.ranks:
        ranks = f"ranks {ranges(subject.options.megatron.ranks).strip('{}')} of {run.sizes.world}"
    model = "HybridModel" if subject.megatron_files.hybrid else "GPTModel"
    tally.facts["megatron"] = [f"megatron-core {versions}, {model}, {run.sizes}, {ranks}, {run.device}"]
    yield from _by_tracker(run)
    by_error: dict[str, list[int]] = defaultdict(list)
    for rank, error in run.failures.items():
        by_error[error].append(rank)
    for error, failed in by_error.items():
        yield Issue(
            "every rank loads the checkpoint",
            error,
            "this is Megatron's own error; training would stop on it too",
            rank=ranks_named(failed),
        )
    for report in run.reports:
        tally.tensors += report.requested
    if renamed := {key for report in run.reports for key in report.renamed}:
        tally.note(
            f"CK401: norms have the names of Transformer Engine's layers alone, such as {fold(sorted(renamed))[0]}, as "
            "trainers save them; Megatron's local spec, which was run here, would not find them by its own"
        )
    yield from _unexpected(run.reports)
    if subject.options.megatron.ranks:
        tally.note(f"--ranks: only {ranks} are looked at; what the others ask for or hold is not")
        return
    yield from _never_asked_for(run.reports, set(_names(subject)))


def _by_tracker(run: MegatronRun) -> Iterator[Issue]:
    if run.not_found:
        hint = "a trainer is told the root and loads what the tracker in it names: write it, or verify the other one"
        yield Issue("the tracker beside it names this checkpoint", run.not_found, hint)


def _unexpected(reports: Sequence[RankReport]) -> Iterator[Issue]:
    askers: dict[str, list[int]] = defaultdict(list)
    for report in reports:
        # Where a key is absent from disk, load_state_dict refuses the parameter too: one finding is enough.
        for name in report.unexpected or report.refused:
            askers[name].append(report.rank)
    for names in group_by_pattern(askers):
        hint = "Megatron would leave it as initialized, at random: compare the arguments of the launch with the release"
        ranks = {rank for name in names for rank in askers[name]}
        yield Issue("on disk, because Megatron asks for it", "not on disk", hint, names=names, rank=ranks_named(ranks))


def _never_asked_for(reports: Sequence[RankReport], names: Container[str]) -> Iterator[Issue]:
    missing = set(reports[0].missing) if reports else set()
    left = [key for key in sorted(missing) if not NOT_WEIGHTS.fullmatch(key) and not _is_alias(key, missing, names)]
    hint = "Megatron builds no such parameter from config.json; where CK104 fails too, it names the key that disagrees"
    yield Issue("loaded by some rank", "no rank asks for it", hint, names=left)


def _is_alias(key: str, missing: set[str], names: Container[str]) -> bool:
    """Whether a key that nobody asked for is the second name of a norm that some rank asked for."""
    alias = norm_alias(key, names)
    return alias is not None and alias not in missing


@check(
    "CK402",
    "every rank holds its slice of the source",
    stage="megatron",
    needs=("megatron",),
    explained_by=("CK202",),
    rationale="Names and shapes can all be right while a rank holds another layer's, another expert's or another "
    "slice's values.",
    fix="Convert again from the source; if it stays, please report it with the megatron-core version.",
)
def right_slices(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every parameter and persistent buffer, bit for bit, against its slice of the source (or of the bytes on disk)."""
    run = finished(subject)
    seen = [(report.rank, tensor) for report in run.reports for tensor in report.tensors]
    for _, tensor in seen:
        tally.compared(tensor.nbytes)
    yield from wrong_slices(run, subject.source_path or subject.path, subject.once(stages_held))
    yield from _rounded([(rank, tensor) for rank, tensor in seen if tensor.name.endswith(_ROUTER_BIAS)])
    if subject.options.megatron.ranks:
        return
    held = {tensor.name for _, tensor in seen}
    yield Issue(
        "held by some rank",
        "no rank has a parameter for it",
        "please report this",
        names=[name for name in _names(subject) if name not in held],
    )


def _rounded(biases: Sequence[tuple[int, TensorSeen]]) -> Iterator[Issue]:
    """Biases of routers that Megatron holds in fewer bits than float32, in which it updates them."""
    narrow = [(rank, tensor) for rank, tensor in biases if tensor.dtype != "float32"]
    yield Issue(
        "held in float32",
        f"Megatron holds it in {', '.join(sorted({tensor.dtype for _, tensor in narrow}))}",
        "experts would be chosen by rounded biases: use a megatron-core that keeps them in float32",
        names=sorted({tensor.name for _, tensor in narrow}),
        rank=ranks_named(rank for rank, _ in narrow) if narrow else None,
    )


@check(
    "CK403",
    "pipeline stages hold every layer exactly once",
    stage="megatron",
    needs=("megatron",),
    rationale="A stage that numbers its layers from 0 again trains the first layers twice and the last ones never.",
    fix="Choose other --pp and --vpp sizes; if it stays, please report it with the megatron-core version.",
)
def all_layers(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Global layer numbers, as Megatron counts them, of every pipeline stage."""
    run = finished(subject)
    stages: dict[int, tuple[tuple[int, ...], ...]] = {}
    for report in run.reports:
        tally.tensors += sum(map(len, report.layers)) + sum(report.mtp)
        if stages.setdefault(report.pp, report.layers) != report.layers:
            expected, actual = (chunk_ranges(layers) for layers in (stages[report.pp], report.layers))
            yield Issue(
                expected,
                actual,
                "ranks of one pipeline stage must hold the same layers",
                rank=ranks_named([report.rank]),
            )
    predicted = {report.pp: sum(report.mtp) for report in run.reports}
    tally.facts["pipeline stages"] = [
        f"pp rank {stage}: {_held(stages[stage], predicted[stage])}" for stage in sorted(stages)
    ]
    if subject.options.megatron.ranks:
        return
    yield from _coverage(stages, staged_dims(subject).layers)


def _held(chunks: Sequence[Sequence[int]], predicted: int) -> str:
    """The layers of a stage, and what predicts further tokens."""
    layers = f"layers {chunk_ranges(chunks)}" if any(chunks) else "no layers"
    return f"{layers}, {predicted} for multi-token prediction" if predicted else layers


def _coverage(stages: Mapping[int, Sequence[Sequence[int]]], count: int) -> Iterator[Issue]:
    held = sorted(layer for chunks in stages.values() for chunk in chunks for layer in chunk)
    if held != list(range(count)):
        yield Issue(f"layers 0..{count - 1}, each once", f"layers {', '.join(map(str, held))}", "please report this")
