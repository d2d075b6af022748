"""CK541: whether transformers' own class finds a tensor for each of its weights, and takes all that are stored."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec

from ckptkit.converters.by_class import built_class
from ckptkit.converters.experts import fuse
from ckptkit.core.specs import TensorSpec, summarize
from ckptkit.formats.hf.reader import INDEX
from ckptkit.formats.hf.side_files import is_quantized, without_quantization
from ckptkit.verify.checks.headers.files import names_of
from ckptkit.verify.core.check import CannotCheck, Issue, NotApplicable, Subject, Tally, check, once
from ckptkit.verify.evidence.expected import expected_of, is_of_no_family
from ckptkit.verify.evidence.extremes import same_bytes
from ckptkit.verify.evidence.folding import by_key, pattern_of
from ckptkit.verify.evidence.plain import plain
from ckptkit.verify.witnesses.reference.job import NamesJob, NamesReport
from ckptkit.verify.witnesses.runner import START_S, Answer, ask_meanwhile

_WITNESS = "ckptkit.verify.witnesses.reference.names"


def _is_asked(subject: Subject) -> None:
    if subject.is_megatron:
        raise NotApplicable("transformers reads HF checkpoints")
    if "transformers" not in subject.against and not is_of_no_family(subject):
        raise NotApplicable("--against-transformers was not given")


@once
def _asked(subject: Subject) -> tuple[Sequence[TensorSpec], Future[Answer[NamesReport]]]:
    """The tensors that transformers is asked about, and its answer, which a process of its own gives meanwhile.

    Raises CannotCheck where transformers is not installed.
    """
    for module in ("torch", "transformers"):
        if find_spec(module) is None:
            raise CannotCheck(f"{module} is not installed, so transformers' class was not asked for names and shapes")
    specs = _plain_specs(subject)
    job = NamesJob(without_quantization(subject.hf_files.config), specs)
    return specs, ask_meanwhile(job, _WITNESS, NamesReport, START_S)


@check(
    "CK541",
    stage="transformers",
    applies_to=_is_asked,
    begin=_asked,
    explained_by=("CK102", "CK103", "CK104", "CK105"),
)
def names_in_transformers(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Names and shapes, loaded by transformers into its class on the meta device; no value is read, no code run."""
    specs, asked = _asked(subject)
    report = asked.result().require("transformers could not be asked")
    if not report.model_class and not report.refused:
        named = ", ".join(subject.hf_files.config.get("architectures") or ()) or "no architectures"
        raise CannotCheck(
            f"transformers has no class for model_type {subject.hf_files.config.get('model_type')!r} ({named}) without "
            "code that comes with the checkpoint"
        )
    tally.compared(len(specs))
    config = subject.path / "config.json"
    if report.refused:
        yield Issue("a config from which transformers builds its class", report.refused, file=config)
        return
    tally.facts["class in transformers"] = [report.model_class]
    integers = {name.rpartition(".")[2] for name in report.integers}
    where = subject.path / INDEX if subject.hf_files.index is not None else subject.path
    if report.fits:
        missed = f"{len(report.missing)} of {len(report.own)} weights of {report.model_class} are not stored"
        actual = f"{report.model_class}: {missed}, and transformers fills them with random numbers"
        hint = f"set architectures to [{report.fits!r}]: its weights are those that are stored"
        yield Issue(f"architectures that name {report.fits}", actual, hint, file=config)
        return
    of_class, wrong = report.model_class, partial(Issue, file=where)
    for names in _parts(report.missing, report.own):
        lost = "missing: transformers fills this weight with random numbers"
        yield wrong(f"a tensor for each weight of {of_class}", lost, names=names, as_one=True)
    for name, (taken, *others) in report.aliases.items():
        stored = subject.checkpoint.read([taken, *others])
        if odd := [other for other in others if not same_bytes(stored[taken], stored[other])]:
            actual = (
                f"not stored: transformers takes {taken} for it, and {summarize(odd)}, which it ties too, has others"
            )
            hint = f"store {name}: of tied weights with several values each release of transformers takes another"
            yield wrong("the values that it was trained with", actual, hint, names=[name])
    # What the family of ours knows to be dropped there, such as layers for multi-token prediction, engines read.
    promised = expected.shapes.keys() | expected.optional if (expected := expected_of(subject)) else frozenset()
    if dropped := sorted(set(report.unexpected).intersection(promised)):
        tally.note(f"{report.model_class} has no place for {summarize(dropped)}, which engines read")
    extra = [name for name in report.unexpected if name not in promised]
    yield wrong(f"only tensors that {of_class} has", "stored, but not in the class: transformers drops it", names=extra)
    for spec in specs:
        if spec.dtype.startswith(("int", "uint")) and spec.name.rpartition(".")[2] not in integers:
            yield wrong(f"a float, as all of this name in {of_class}", spec.dtype, names=[spec.name])
    for one in report.other_shapes:
        yield wrong(f"shape {tuple(one.built)} in {of_class}", f"shape {tuple(one.stored)}", names=[one.name])
    for name, text in report.errors.items():
        yield wrong(f"tensors that become this weight of {of_class}", text, names=[name])


def _parts(lost: Collection[str], own: Collection[str]) -> Collection[list[str]]:
    """The names of `lost` as findings tell them: each module of which the class finds nothing, or each kind of tensor.

    The same of several layers is one.
    """
    found = {part for name in set(own).difference(lost) for part in _homes(name)}
    outermost = {name: next((part for part in _homes(name) if part not in found), name) for name in lost}
    return by_key((pattern_of(part), name) for name, part in outermost.items()).values()


def _homes(name: str) -> Iterator[str]:
    """The modules that a tensor is in, the outermost first."""
    at = name.find(".")
    while at >= 0:
        yield name[:at]
        at = name.find(".", at + 1)


def _plain_specs(subject: Subject) -> Sequence[TensorSpec]:
    """The tensors as their weights are when nothing is packed, which is how transformers' class has them."""
    config = subject.hf_files.config
    if not is_quantized(config):
        return list(names_of(subject).values())
    specs, built = plain(subject.path).specs, built_class(config)
    if built is not None and built.joins_experts:
        return [spec for step in fuse(specs, config, "").steps for spec in step.outputs]
    return list(specs.values())
