"""CK541: whether transformers' own class finds a tensor for each of its weights, and takes all that are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from ckptkit.core.specs import TensorSpec, summarize
from ckptkit.formats.hf.reader import INDEX
from ckptkit.formats.hf.side_files import is_quantized, without_quantization
from verify.check import Tally, Unable, check
from verify.checks.headers.files import names_of
from verify.evidence.expected import expected_of, is_of_no_family
from verify.evidence.plain import plain
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.witnesses.process.run import ask
from verify.witnesses.reference.job import NamesJob, NamesReport

_WITNESS = "verify.witnesses.reference.names"
_LIMIT_S = 900  # importing transformers on a busy machine, and building a large class


def _not_asked(subject: Subject) -> str | None:
    if subject.is_megatron:
        return "transformers reads HF checkpoints"
    if "transformers" in subject.against:
        return None
    return None if subject.once(is_of_no_family) else "--against-transformers was not given"


@check(
    "CK541",
    "transformers' class has a tensor for each of its weights, and a place for each tensor",
    stage="transformers",
    rationale="transformers fills a weight that it finds no tensor for with random numbers, and drops a tensor that it "
    "has no place for. It goes on with a line in its log.",
    fix="Take the named tensors and config.json from the release.",
    unless=_not_asked,
    explained_by=("CK102", "CK103", "CK104", "CK105"),
)
def names_in_transformers(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Names and shapes, loaded by transformers into its class on the meta device; no value is read, no code run."""
    specs = _plain_specs(subject)
    found = _asked(subject, specs)
    if not found.model_class and not found.refused:
        named = ", ".join(subject.hf_files.config.get("architectures") or ()) or "no architectures"
        raise Unable(
            f"transformers has no class for model_type {subject.hf_files.config.get('model_type')!r} ({named}) without "
            "code that comes with the checkpoint"
        )
    tally.compared(0, len(specs))
    config = subject.path / "config.json"
    if found.refused:
        yield Issue("a config from which transformers builds its class", found.refused, file=config)
        return
    tally.facts["class in transformers"] = [found.model_class]
    where = subject.path / INDEX if subject.hf_files.index is not None else subject.path
    yield Issue(
        f"a tensor for each weight of {found.model_class}",
        "missing: transformers fills this weight with random numbers",
        names=found.missing,
        file=where,
    )
    # What the family of ours knows to be dropped there, such as layers for multi-token prediction, engines read.
    promised = expected.shapes.keys() | expected.optional if (expected := subject.once(expected_of)) else frozenset()
    if dropped := sorted(set(found.unexpected).intersection(promised)):
        tally.note(f"{found.model_class} has no place for {summarize(dropped)}, which engines read")
    yield Issue(
        f"only tensors that {found.model_class} has",
        "stored, but not in the class: transformers drops it",
        names=[name for name in found.unexpected if name not in promised],
        file=where,
    )
    for one in found.other_shapes:
        yield Issue(
            f"shape {tuple(one.built)} in {found.model_class}",
            f"shape {tuple(one.stored)}",
            names=[one.name],
            file=where,
        )
    for name, text in found.errors.items():
        yield Issue(f"tensors that become this weight of {found.model_class}", text, names=[name], file=where)


def _plain_specs(subject: Subject) -> Sequence[TensorSpec]:
    """The tensors as their weights are when nothing is packed, which is how transformers' class has them."""
    quantized = is_quantized(subject.hf_files.config)
    return list((plain(subject.path).specs if quantized else names_of(subject)).values())


def _asked(subject: Subject, specs: Sequence[TensorSpec]) -> NamesReport:
    for module in ("torch", "transformers"):
        if find_spec(module) is None:
            raise Unable(f"{module} is not installed, so transformers' class was not asked for names and shapes")
    job = NamesJob(without_quantization(subject.hf_files.config), specs)
    report, failed = ask(job, _WITNESS, NamesReport, _LIMIT_S)
    if report is None:
        raise Unable(f"transformers could not be asked, which says nothing about the checkpoint: {failed}")
    return report
