"""CK541: transformers' class finds a tensor for each of its weights, and loads all stored ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from itertools import accumulate, islice

from ckptkit.converters.by_class import built_class
from ckptkit.converters.experts import fuse
from ckptkit.core.specs import TensorSpec, summarize
from ckptkit.formats.hf.reader import INDEX
from ckptkit.formats.hf.side_files import is_quantized, without_quantization
from ckptkit.verify.checks.headers.files import names_of
from ckptkit.verify.core.check import CannotCheck, CheckResult, Issue, NotApplicable, Subject, check, once
from ckptkit.verify.evidence.expected import expected_of, is_of_no_family
from ckptkit.verify.evidence.extremes import same_bytes
from ckptkit.verify.evidence.folding import by_key, pattern_of
from ckptkit.verify.evidence.plain import plain
from ckptkit.verify.witnesses.reference.job import NamesJob, NamesReport
from ckptkit.verify.witnesses.runner import START_S, Answer, ask_meanwhile


def _is_requested(subject: Subject) -> None:
    if subject.kind == "megatron":
        raise NotApplicable("transformers reads only HF checkpoints")
    if "transformers" not in subject.against and not is_of_no_family(subject):
        raise NotApplicable("--against-transformers was not given")


@once
def _ask(subject: Subject) -> tuple[Sequence[TensorSpec], Future[Answer[NamesReport]]]:
    """Starts a process in which transformers loads these tensors. Raises CannotCheck if it is not installed."""
    for module in ("torch", "transformers"):
        if find_spec(module) is None:
            raise CannotCheck(f"{module}, which builds transformers' class, is not installed")
    specs = _plain_specs(subject)
    job = NamesJob(without_quantization(subject.hf_files.config), specs)
    return specs, ask_meanwhile(job, "ckptkit.verify.witnesses.reference.names", NamesReport, START_S)


@check(
    "CK541",
    stage="transformers",
    applies_to=_is_requested,
    begin=_ask,
    explained_by=("CK102", "CK103", "CK104", "CK105"),
)
def names_in_transformers(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Names and shapes, loaded by transformers on the meta device, without values and the checkpoint's code."""
    specs, answer = _ask(subject)
    report = answer.result().require("transformers did not run")
    if not report.model_class and not report.refused:
        named = ", ".join(subject.hf_files.config.get("architectures") or ()) or "no architectures"
        model_type = f"model_type {subject.hf_files.config.get('model_type')!r} ({named})"
        raise CannotCheck(f"transformers has no class for {model_type}, and ckptkit does not run the checkpoint's code")
    result.compared(len(specs))
    config = subject.path / "config.json"
    if report.refused:
        yield Issue("a config that transformers accepts", report.refused, file=config)
        return
    result.facts["class in transformers"] = [report.model_class]
    integers = {name.rpartition(".")[2] for name in report.integers}
    where = subject.path / INDEX if subject.hf_files.index is not None else subject.path
    if report.fits:
        missed = f"{len(report.missing)} of {len(report.own)} weights"
        actual = f"architectures is {report.model_class}, of which {missed} are not stored and would be random"
        hint = f"set architectures to [{report.fits!r}], which has the stored weights"
        yield Issue(f"architectures is {report.fits}", actual, hint, file=config)
        return
    of_class, wrong = report.model_class, partial(Issue, file=where)
    # Missing names by the outermost module without any tensor, or by kind of tensor; layers are grouped.
    present = {module for name in set(report.own).difference(report.missing) for module in _modules(name)}
    outermost = {name: next((one for one in _modules(name) if one not in present), name) for name in report.missing}
    for names in by_key((pattern_of(module), name) for name, module in outermost.items()).values():
        lost = "missing, so transformers fills this weight with random numbers"
        yield wrong(f"a tensor for each weight of {of_class}", lost, names=names, as_one=True)
    for name, (used, *others) in report.aliases.items():
        stored = subject.checkpoint.read([used, *others])
        if odd := [other for other in others if not same_bytes(stored[used], stored[other])]:
            actual = f"not stored: transformers uses {used}, but the tied {summarize(odd)} has other values"
            hint = f"store {name}, since releases of transformers choose different ones of tied weights"
            yield wrong("the trained values of a tied weight", actual, hint, names=[name])
    # Engines read tensors that ckptkit's family promises and this class drops, such as multi-token prediction layers.
    promised = expected.shapes.keys() | expected.optional if (expected := expected_of(subject)) else frozenset()
    if dropped := sorted(set(report.unexpected).intersection(promised)):
        result.note(f"transformers' {report.model_class} drops {summarize(dropped)}, which engines load")
    extra = [name for name in report.unexpected if name not in promised]
    yield wrong(f"only tensors of {of_class}", "the class has no such tensor, so transformers drops it", names=extra)
    for spec in specs:
        if spec.dtype.startswith(("int", "uint")) and spec.name.rpartition(".")[2] not in integers:
            yield wrong(f"a float, as in {of_class}", spec.dtype, names=[spec.name])
    for one in report.other_shapes:
        yield wrong(f"shape {tuple(one.built)} in {of_class}", f"shape {tuple(one.stored)}", names=[one.name])
    for name, text in report.errors.items():
        yield wrong(f"tensors that become this weight of {of_class}", text, names=[name])


def _modules(name: str) -> Iterator[str]:
    """The modules that contain a tensor, outermost first."""
    return islice(accumulate(name.split("."), "{}.{}".format), name.count("."))


def _plain_specs(subject: Subject) -> Sequence[TensorSpec]:
    """The tensors as in transformers' class, without packing."""
    config = subject.hf_files.config
    if not is_quantized(config):
        return list(names_of(subject).values())
    specs, built = plain(subject.path).specs, built_class(config)
    if built is not None and built.joins_experts:
        return [spec for step in fuse(specs, config, "").steps for spec in step.outputs]
    return list(specs.values())
