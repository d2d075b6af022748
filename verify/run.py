"""`verify`: which checks apply to a checkpoint, all of them run, and one report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptkit.converters.draft import is_draft
from ckptkit.core.errors import CkptkitError, UnsupportedError, UsageError
from ckptkit.core.installation import program_version
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
from ckptkit.verify.core.check import NOT_APPLICABLE, all_checks
from ckptkit.verify.core.report import Finding, Report, anchors, now
from ckptkit.verify.core.run import looked_at, run_checks
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.expected import model_of, usable_config
from ckptkit.verify.evidence.floats.rounding import float_rounding_of, float_weights
from ckptkit.verify.evidence.folding import layers_of
from ckptkit.verify.evidence.reading import read_values
from ckptkit.verify.evidence.rounding import rounding_of
from ckptkit.verify.options import VerifyOptions, verify_options
from ckptkit.verify.reports.heat import Heat, Measured, heat_map, of_values
from ckptkit.verify.witnesses.megatron.run import sizes_of
from ckptkit.verify.witnesses.registry import programs_not_asked
from ckptkit.verify.witnesses.rollouts.run import recording_of

_PACKED_PART = re.compile(r"\.weight_\w+$")


@dataclass(frozen=True)
class _OfItsOwn:
    """What has checks of its own: as the report names it, what its source is, and what else may be asked."""

    what: str
    model: str
    source: str
    hint: str
    against: frozenset[str] = frozenset()


_OF_ITS_OWN = {
    "adapter": _OfItsOwn(
        "an adapter",
        "LoRA adapter",
        "base model",
        "merge it (`ckptkit convert BASE DST --merge ADAPTER`), and verify what that gives",
        frozenset({"transformers"}),
    ),
    "draft": _OfItsOwn(
        "a draft model", "EAGLE draft model", "target", "verify the model that it drafts for with the other options"
    ),
}


def verify(
    path: str | Path,
    source: str | Path | None = None,
    hf: str | Path | None = None,
    *,
    command: Sequence[str] = (),
    **options: Any,
) -> Report:
    """Verifies the checkpoint at `path`, HF or Megatron, and returns the report; nothing is written.

    `source` is what it was made from; then every value is compared. `hf` gives the config of a Megatron checkpoint that
    has none beside it. `options` mean what the fields of `ckptkit.verify.options.VerifyOptions` and of its `megatron`
    mean.

    A broken checkpoint gives findings. CkptkitError means that there is no checkpoint at `path` or `source`, that a
    file which an option names cannot be used, that options contradict each other, that a dependency is missing, or that
    the model cannot be cut into these sizes.
    """
    return report_on(subject_of(path, source, hf, **options), path, source, command)


def subject_of(
    path: str | Path,
    source: str | Path | None = None,
    hf: str | Path | None = None,
    **options: Any,
) -> Subject:
    """What `verify` looks at, before anything has been read of the weights. Raises as `verify`."""
    if hf is not None:
        refuse_url(hf)
        if not (Path(hf) / "config.json").exists():
            hint = (
                "--hf names the HF directory of the model; leave it out to take the config stored next to the weights"
            )
            raise CkptkitError(f"{hf} has no config.json", hint)
    subject = Subject(Path(path), Path(source) if source else None, options=verify_options(**options))
    if unknown := sorted(subject.options.accept - {one.code for one in all_checks()}):
        raise UsageError(f"--accept names no check: {', '.join(unknown)}", "`ckptkit explain` lists the codes")
    if subject.options.adapter is not None and source is None:
        raise UsageError("an adapter without a source", "give the base that it was merged into too (--source)")
    if subject.options.trained and source is None:
        raise UsageError("trained without a source", "give the release that training started from too (--source)")
    if subject.options.adapter is not None and not subject.source_is_hf:
        raise UsageError(f"{source} is a Megatron checkpoint", "give the HF base that the adapter was merged into")
    if stage := _stage_of_its_own(subject.path):
        own = _OF_ITS_OWN[stage]
        asked = replace(subject.options, against=subject.against - own.against)
        if hf is not None or asked != VerifyOptions():
            only = " and ".join(["--source", *(f"--against-{one}" for one in own.against)])
            raise UsageError(f"{subject.path} is {own.what}, of which nothing but {only} can be asked", own.hint)
        for one in filter(None, (subject.path, subject.source_path)):
            require_own_files(one)
        return subject
    subject = replace(subject, hf_path=Path(hf) if hf is not None else _config_home(subject))
    _check_early(subject, hf, path)
    return subject


def report_on(subject: Subject, path: str | Path, source: str | Path | None, command: Sequence[str]) -> Report:
    """Runs the checks of what `subject_of` made of a `path` and a `source`. Raises as `verify`."""
    stage, others = stage_of(subject), {"launch", "deltas", *_OF_ITS_OWN}
    checks = [one for one in all_checks() if (one.stage == stage if stage else one.stage not in others)]
    with require_unchanged([weights_at(path) for path in (subject.path, subject.source_path) if path], is_own):
        outcome = run_checks(subject, checks)
    outcome.accept(subject.options.accept)
    left_out = outcome.not_applicable_lines
    findings = with_causes(outcome.findings, {one.code: one.explained_by for one in checks})
    own = _OF_ITS_OWN.get(stage or "")
    return Report(
        version=program_version(),
        command=tuple(command),
        checkpoint=str(path),
        source=str(source) if source else None,
        checks=outcome.checks,
        findings=findings,
        facts=outcome.facts | ({NOT_APPLICABLE: left_out} if left_out else {}),
        heat={} if own else _heat(subject, findings),
        reasons=outcome.reasons,
        model=own.model if own else model_of(subject),
        date=now(),
        asked=looked_at(outcome.checks) + (["manifest"] if subject.options.manifest else []),
        not_asked=([] if source else [own.source]) if own else _not_asked(subject),
    )


def stage_of(subject: Subject) -> str | None:
    """The one stage whose checks look at what lies there; None: a checkpoint, which has all others."""
    return _stage_of_its_own(subject.path) or ("deltas" if subject.is_deltas else None)


def _stage_of_its_own(path: Path) -> str | None:
    """The stage of what is no checkpoint of a supported model: an adapter, or a draft model."""
    if is_adapter(path):
        return "adapter"
    with suppress(CkptkitError):
        if (path / "config.json").exists() and is_draft(read_config(path)):
            return "draft"
    return None


def _not_asked(subject: Subject) -> list[str]:
    """What could have been given or asked, as the verdict names it; a live engine is SGLang too."""
    source = ["source"] if subject.source_path is None else []
    return source if subject.is_deltas else source + programs_not_asked(subject.against)


def _heat(subject: Subject, findings: Sequence[Finding]) -> Heat:
    """The heat map of what the checks compared; bytes that no check read are not read for it."""
    values, steps = subject.found(read_values), subject.found(rounding_of)
    floats = subject.found(float_weights)
    judged = floats.judged if floats else ()
    measured = [*of_values(values, judged, is_trained=subject.options.trained)] if values else []
    # What CK305 found of packed weights, and of those in floats: whether they are further off than rounding takes them.
    measured += [(name, Measured(steps=one.steps, failed=one.failed)) for name, one in (steps or {}).items()]
    rounded = subject.found(float_rounding_of) or {}
    measured += [(name, Measured(failed=one.wrong > 0)) for name, one in rounded.items()]
    return heat_map(measured, findings)


def _refuse_other_formats(subject: Subject) -> None:
    """The checks of Megatron checkpoints are checks of torch_dist. Raises CkptkitError where another format lies."""
    path = subject.path
    weights = path
    try:
        weights = iteration_of(path)
    except (UsageError, UnsupportedError):
        raise
    except CkptkitError:
        pass  # a matter of CK111
    if is_legacy(weights):
        hint = "export it (`ckptkit convert`), then `ckptkit verify` the export with --source and this path"
        raise CkptkitError(f"{weights} is in Megatron's legacy format (mp_rank_*), which verify cannot look into", hint)
    if subject.is_megatron:
        subject.megatron_files.readable  # noqa: B018 - raises for a distributed checkpoint that is not torch_dist
    else:
        refuse_other_format(subject.path)


def _check_early(subject: Subject, hf: str | Path | None, path: str | Path) -> None:
    """Raises CkptkitError, before every byte has been read, for what is not a matter of the checkpoint."""
    if subject.source_path:
        locate(subject.source_path)
    subject.kind  # noqa: B018 - raises where there is no checkpoint
    for own in filter(None, (subject.path, subject.source_path, subject.hf_path, subject.options.adapter)):
        require_own_files(own)  # those of other readers included
    if hf is not None and not subject.is_megatron and subject.source_is_hf:
        refuse_hf(hf, path)
    if not subject.is_deltas:
        _refuse_other_formats(subject)
    elif subject.options != VerifyOptions():
        hint = "make the full checkpoint (`ckptkit convert DELTAS DST --hf BASE`) and verify that"
        raise UsageError(f"{subject.path} holds deltas, of which only --source (their base) is asked", hint)
    elif subject.source_path and not subject.source_is_hf:
        raise UsageError(f"{subject.source_path} is not an HF directory", "deltas are against --hf-checkpoint")
    if subject.options.rollout_data is not None:
        recording_of(subject)
    with suppress(NotApplicable, CannotCheck):
        if "megatron" in subject.against and usable_config(subject) is not None:
            sizes_of(subject)


def _config_home(here: Subject) -> Path | None:
    """Where the HF config of a Megatron side comes from without --hf: the other side, if that is HF and it has none."""
    path, source = here.path, here.source_path
    if source is None:
        here.kind  # noqa: B018 - raises where there is no checkpoint
        return None
    there = locate(source)
    if here.is_hf:
        return path if there.is_megatron and not (there.root / "hf" / "config.json").exists() else None
    root = path if (path / TRACKER).exists() or is_nemo(path) else path.parent
    return None if (root / "hf" / "config.json").exists() or there.is_megatron else source


def with_causes(findings: Sequence[Finding], explained_by: Mapping[str, Sequence[str]]) -> list[Finding]:
    """The findings, each with its `cause`: the first, as bad or worse, that half of its tensors are in.

    `explained_by`: whose findings may be the cause of a check's, by code. A cause has none itself.
    """
    by_anchor = dict(zip(anchors(findings), findings, strict=True))
    weights = {
        anchor: frozenset(_PACKED_PART.sub(".weight", name) for name in one.names | one.explains)
        for anchor, one in by_anchor.items()
    }
    causes: dict[str, str] = {}

    def root(anchor: str) -> str:
        return root(causes[anchor]) if anchor in causes else anchor

    def covers(explained: frozenset[str], names: frozenset[str]) -> bool:
        return bool(names) and 2 * len(names & explained) >= len(names)

    def is_same_move(one: Finding, other: Finding) -> bool:
        """Whether both say the same of the same layers, whose tensors a program may know by other names."""
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
