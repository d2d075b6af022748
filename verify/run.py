"""`verify`: runs all checks that apply to a checkpoint, and returns one report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptkit.converters.draft import is_draft
from ckptkit.core.errors import CkptkitError, UnsupportedError, UsageError
from ckptkit.core.signature import public
from ckptkit.formats.detect import (
    TRACKER,
    is_legacy,
    is_nemo,
    iteration_of,
    locate,
    refuse_hf,
    refuse_other_format,
    refuse_url,
    require_own_files,
)
from ckptkit.formats.hf.adapter import is_adapter
from ckptkit.formats.hf.reader import read_config
from ckptkit.formats.hf.side_files import is_own, weights_at
from ckptkit.storage.fingerprint import require_unchanged
from ckptkit.verify.core.check import OF_LAUNCHES, all_checks
from ckptkit.verify.core.report import Finding, Report, anchors
from ckptkit.verify.core.run import checked_stages, run_checks
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.expected import config_or_none, model_of
from ckptkit.verify.evidence.floats.rounding import float_rounding_of, float_weights
from ckptkit.verify.evidence.folding import layers_of
from ckptkit.verify.evidence.reading import read_values
from ckptkit.verify.evidence.rounding import rounding_of
from ckptkit.verify.options import VerifyOptions, verify_options
from ckptkit.verify.reports.heat import Heat, Measured, heat_map, measured_values
from ckptkit.verify.witnesses.megatron.run import sizes_of
from ckptkit.verify.witnesses.registry import programs_not_used
from ckptkit.verify.witnesses.rollouts.run import recording_of

_PACKED_PART = re.compile(r"\.weight_\w+$")


@dataclass(frozen=True)
class _SpecialKind:
    """A kind of directory with checks of its stage only, and no other options than `--source` and some witnesses."""

    name: str
    model: str
    source: str
    hint: str
    against: frozenset[str] = frozenset()


_SPECIAL_KINDS = {
    "adapter": _SpecialKind(
        "an adapter",
        "LoRA adapter",
        "base model",
        "merge the adapter (`ckptkit convert BASE DST --merge ADAPTER`), and verify the merged model",
        frozenset({"transformers"}),
    ),
    "draft": _SpecialKind(
        "a draft model", "EAGLE draft model", "target", "use the other options with the model that it drafts for"
    ),
}


@public(VerifyOptions)
def verify(
    path: str | Path,
    source: str | Path | None = None,
    hf: str | Path | None = None,
    *,
    command: Sequence[str] = (),
    **options: Any,
) -> Report:
    """Verifies the checkpoint at `path`, HF or Megatron, and returns the report; nothing is written.

    `source` is the checkpoint that it was made from; with one, every value is compared. `hf` is the HF directory with
    the config of a Megatron checkpoint that stores none. `against`: the programs to ask, such as "megatron" and
    "sglang"; the other options are those of `ckptkit verify --help`.

    A broken checkpoint gives findings. Raises CkptkitError if there is no checkpoint at `path` or `source`, a file of
    an option cannot be used, options contradict each other, a dependency is missing, or the model does not fit the
    parallel sizes.
    """
    return report_on(subject_of(path, source, hf, **options), path, source, command)


def subject_of(
    path: str | Path, source: str | Path | None = None, hf: str | Path | None = None, **options: Any
) -> Subject:
    """The subject of `verify`, before any weight is read. Raises as `verify`."""
    if hf is not None:
        refuse_url(hf)
        if not (Path(hf) / "config.json").exists():
            hint = "pass the HF directory of the model as --hf, or leave it out to use the config next to the weights"
            raise CkptkitError(f"{hf} has no config.json", hint)
    subject = Subject(Path(path), Path(source) if source else None, options=verify_options(**options))
    accept = subject.options.accept
    if accept and (unknown := sorted(accept - {one.code for one in all_checks()})):
        raise UsageError(f"--accept has unknown codes: {', '.join(unknown)}", "use a code that `ckptkit explain` lists")
    if subject.options.adapter is not None and source is None:
        raise UsageError("an adapter needs a source", "pass the base that the adapter was merged into (--source)")
    if subject.options.trained and source is None:
        raise UsageError("trained needs a source", "pass the release that training started from (--source)")
    if subject.options.adapter is not None and not subject.source_is_hf:
        raise UsageError(f"{source} is a Megatron checkpoint", "pass the HF base that the adapter was merged into")
    if stage := _special_stage(subject.path):
        kind = _SPECIAL_KINDS[stage]
        if hf is not None or replace(subject.options, against=subject.against - kind.against) != VerifyOptions():
            only = " and ".join(["--source", *(f"--against-{one}" for one in kind.against)])
            raise UsageError(f"{subject.path} is {kind.name}, which supports only {only}", kind.hint)
        for one in filter(None, (subject.path, subject.source_path)):
            require_own_files(one)
        return subject
    subject = replace(subject, hf_path=Path(hf) if hf is not None else _find_config(subject))
    _check_early(subject, hf, path)
    return subject


def report_on(subject: Subject, path: str | Path, source: str | Path | None, command: Sequence[str]) -> Report:
    """Runs the checks of a subject, which `subject_of` made from `path` and `source`. Raises as `verify`."""
    stage, others = stage_of(subject), {"launch", "deltas", *_SPECIAL_KINDS}
    checks = [one for one in all_checks(OF_LAUNCHES) if (one.stage == stage if stage else one.stage not in others)]
    with require_unchanged([weights_at(path) for path in (subject.path, subject.source_path) if path], is_own):
        report = run_checks(subject, checks)
    findings = with_causes(report.findings, {one.code: one.explained_by for one in checks})
    special = _SPECIAL_KINDS.get(stage or "")
    not_asked = [] if source else [special.source if special else "source"]
    not_asked += [] if special or subject.kind == "deltas" else programs_not_used(subject.against)
    return replace(
        report,
        command=tuple(command),
        checkpoint=str(path),
        source=str(source) if source else None,
        findings=findings,
        heat={} if special else _heat(subject, findings),
        model=special.model if special else model_of(subject),
        asked=[*checked_stages(report.checks), *["manifest"] * bool(subject.options.manifest)],
        not_asked=not_asked,
    )


def stage_of(subject: Subject) -> str | None:
    """The only stage of the subject, or None for a checkpoint, which has several."""
    return _special_stage(subject.path) or ("deltas" if subject.kind == "deltas" else None)


def _special_stage(path: Path) -> str | None:
    """The stage of an adapter or a draft model."""
    if is_adapter(path):
        return "adapter"
    with suppress(CkptkitError):
        if (path / "config.json").exists() and is_draft(read_config(path)):
            return "draft"
    return None


def _heat(subject: Subject, findings: Sequence[Finding]) -> Heat:
    """The heat map of all comparisons so far; it reads no bytes."""
    values, steps = subject.peek(read_values), subject.peek(rounding_of)
    floats = subject.peek(float_weights)
    judged = floats.judged if floats else ()
    measured = [*measured_values(values, judged, is_trained=subject.options.trained)] if values else []
    # CK305's results for packed weights, then for weights in floats.
    measured += [(name, Measured(steps=one.steps, failed=one.failed)) for name, one in (steps or {}).items()]
    rounded = subject.peek(float_rounding_of) or {}
    measured += [(name, Measured(failed=one.wrong > 0)) for name, one in rounded.items()]
    return heat_map(measured, findings)


def _check_early(subject: Subject, hf: str | Path | None, path: str | Path) -> None:
    """Raises CkptkitError, before any weight is read, for faults that are not in the checkpoint."""
    if subject.source_path:
        locate(subject.source_path)
    subject.kind  # noqa: B018 - raises if there is no checkpoint
    for own in filter(None, (subject.path, subject.source_path, subject.hf_path, subject.options.adapter)):
        require_own_files(own)  # including files that only other readers load
    if hf is not None and subject.kind != "megatron" and subject.source_is_hf:
        refuse_hf(hf, path)
    if subject.kind != "deltas":
        weights = subject.path
        try:
            weights = iteration_of(weights)
        except (UsageError, UnsupportedError):
            raise
        except CkptkitError:
            pass  # CK111 reports it
        if is_legacy(weights):
            hint = "convert it (`ckptkit convert`), then run `ckptkit verify` on the result with this path as --source"
            raise CkptkitError(f"{weights} is in Megatron's legacy format (mp_rank_*), which verify cannot read", hint)
        if subject.kind == "megatron":
            subject.megatron_files.readable  # noqa: B018 - raises for a format that is not torch_dist
        else:
            refuse_other_format(subject.path)
    elif subject.options != VerifyOptions():
        hint = "make the full checkpoint (`ckptkit convert DELTAS DST --hf BASE`) and verify that"
        raise UsageError(f"{subject.path} holds deltas, which can be verified with --source (their base) only", hint)
    elif subject.source_path and not subject.source_is_hf:
        raise UsageError(f"{subject.source_path} is not an HF directory", "pass the --hf-checkpoint of the job")
    if subject.options.rollout_data is not None:
        recording_of(subject)
    with suppress(NotApplicable, CannotCheck):
        if "megatron" in subject.against and config_or_none(subject) is not None:
            sizes_of(subject)


def _find_config(subject: Subject) -> Path | None:
    """The HF directory with the config without --hf: the HF side, if the Megatron side stores no config."""
    path = subject.path
    if subject.source_path is None:
        subject.kind  # noqa: B018 - raises if there is no checkpoint
        return None
    source = locate(subject.source_path)
    if subject.kind == "hf":
        return path if source.kind == "megatron" and not (source.root / "hf" / "config.json").exists() else None
    root = path if (path / TRACKER).exists() or is_nemo(path) else path.parent
    return None if (root / "hf" / "config.json").exists() or source.kind == "megatron" else subject.source_path


def with_causes(findings: Sequence[Finding], explained_by: Mapping[str, Sequence[str]]) -> list[Finding]:
    """The findings, each with its `cause`: the first finding, at least as severe, that has half of its tensors.

    `explained_by` are the codes of the checks that find causes, by the code of the check. A cause has no cause itself.
    """
    by_anchor = dict(zip(anchors(findings), findings, strict=True))
    weights = {
        anchor: frozenset(_PACKED_PART.sub(".weight", name) for name in one.names | one.also_affected)
        for anchor, one in by_anchor.items()
    }
    causes: dict[str, str] = {}

    def root(anchor: str) -> str:
        return root(causes[anchor]) if anchor in causes else anchor

    def covers(explained: frozenset[str], names: frozenset[str]) -> bool:
        return bool(names) and 2 * len(names & explained) >= len(names)

    def is_same_move(one: Finding, other: Finding) -> bool:
        """Whether both report the same for the same layers; programs may name the tensors differently."""
        layers = layers_of(one.names)
        return bool(layers) and one.actual == other.actual and layers == layers_of(other.names)

    for anchor, finding in by_anchor.items():
        for code in explained_by.get(finding.code, ()):
            for other, candidate in by_anchor.items():
                if (
                    candidate.code == code
                    and anchor not in causes
                    and root(other) != anchor
                    and candidate.severity in ("error", finding.severity)
                    and (covers(weights[other], weights[anchor]) or is_same_move(candidate, finding))
                ):
                    causes[anchor] = other
    return [replace(finding, cause=root(anchor) if anchor in causes else None) for anchor, finding in by_anchor.items()]
