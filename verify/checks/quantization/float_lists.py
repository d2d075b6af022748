"""CK302 of weights in floats: what each reader takes for quantized by the lists of config.json, against the files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptkit.core.dtypes import COMPUTED
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import fold
from quant.selection.readers import refuses_own_format
from verify.check import Skip, Tally, Unable
from verify.checks.quantization.quantization_config import misread_floats
from verify.evidence.expected import usable_config
from verify.evidence.floats.stored import stored_floats_of
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.report import Severity


def float_lists(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """What `ckptkit lint` finds for the engine, or for the readers of `--reader`. Of others only `lint` tells.

    Raises Skip for a model whose modules are not known, and Unable where the lists cannot be read.
    """
    where, config = subject.path / "config.json", usable_config(subject)
    misread = list(misread_floats(config, subject.hf_files.specs, subject.readers)) if config else []
    yield from (replace(issue, file=where) for issue in misread)
    if any(issue.severity == "error" for issue in misread):
        return
    # Imported here because they bring transformers with them, which takes seconds.
    from quant.lint.opening import open_subject
    from quant.selection.portable import described

    readers = subject.readers or (("vllm",) if subject.engine == "vllm" else None)
    try:
        usual, _ = open_subject(subject.path)
    except CkptkitError as error:
        raise Unable(f"no decision for these lists of unquantized modules: {error.message}") from error
    try:
        found = open_subject(subject.path, readers)[0] if readers else usual
    except CkptkitError as error:
        raise Skip(error.message) from error
    if not found.matrices:
        raise Skip("which modules of this model are Linear layers is not known here")
    tally.compared(0, len(found.matrices))
    expected = "lists that every reader takes as the weights are stored"
    counting = {reader for reader in found.readers if found.severities[reader] == "error"}
    differing = [one for one in found.divergences(found.readings) if one.reader in counting]
    if (announced := subject.once(stored_floats_of)) is not None and not announced[1]:
        wanted = {matrix.tensor for matrix, packed in zip(found.matrices, found.packed, strict=True) if packed}
        wanted |= {one.tensor for one in differing if one.answer == "packs"}
        stored = [spec for name, spec in subject.hf_files.specs.items() if name in wanted]
        if stored and all(spec.dtype in COMPUTED for spec in stored):
            yield _none_of_them(subject, announced[0].words, len(stored))
        return
    for refusal in found.refusals():
        always = refuses_own_format(refusal.readers, subject.readers)
        if who := [reader for reader in refusal.readers if always or reader in counting]:
            yield Issue(expected, f"{' and '.join(who)}: {refusal.what}", refusal.hint, file=where)
    for reader in dict.fromkeys(one.reader for one in differing):
        own = [one for one in differing if one.reader == reader]
        patterns = fold(dict.fromkeys(pattern for one in own for pattern in one.patterns))
        unlisted = next((one.tensor.removesuffix(".weight") for one in own if one.answer == "packs"), None)
        hint = found.next_move([reader], patterns[:3], next(iter(patterns), unlisted))
        yield Issue(expected, "; ".join(described(own)), hint, file=where)


def _none_of_them(subject: Subject, words: str, count: int) -> Issue:
    """Plain weights under a config.json of quantized ones. A job that sends quantized weights replaces them."""
    hint = "engines cast the numbers to codes and find no scale: take quantization_config out of config.json"
    actual = f"all {count} such weights are stored as plain numbers, without scales"
    severity: Severity = "error" if subject.updated is False else "warning"
    where = subject.path / "config.json"
    return Issue(f"{words}, as config.json says", actual, f"{hint}, or quantize", file=where, severity=severity)
