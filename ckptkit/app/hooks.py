"""Functions for the hook points of slime and miles, which stop the job if they find a fault.

Signatures are those of slime 624b824 (`docs/en/get_started/customization.md`, sections 17 and 19) and miles 31f1ca9
(`docs/user-guide/customization.md`, `backends/megatron_utils/actor.py`). Skipped checks do not stop the job; they are
reported on standard error.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.converters.planner import dims_of, rules_of
from ckptkit.converters.stored import adapt_config
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import summarize
from ckptkit.formats.deltas import require_sound, single_delta
from ckptkit.formats.detect import is_deltas, require_own_files
from ckptkit.formats.hf.reader import HfCheckpoint, read_json
from ckptkit.verify.checks.config.arguments import mismatches
from ckptkit.verify.core.report import Finding
from ckptkit.verify.core.run import report_of
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.launch.preflight import check_headers, preflight
from ckptkit.verify.weight_sync.messages import first_lines, job_rank, say

if TYPE_CHECKING:
    import torch


__all__ = ["after_init", "after_save", "after_weight_write", "before_log_prob", "before_train_step"]

_ROUTER = ".router.weight"  # suffix of Megatron's names of router matrices
_COMPARED = "ckptkit_compared"  # the argument with the prefixes compared so far, and _TRAINED after a training step
_TRAINED = "trained"


def after_init(args: Namespace) -> None:
    """`--custom-megatron-init-path`: the model arguments describe the model of --hf-checkpoint.

    Every rank checks them, so that all stop together. Training without multi-token prediction layers is allowed. Raises
    CkptkitError naming each argument, also if config.json cannot be read or the model is not supported.
    """
    home = _hf_checkpoint(args)
    lines = [
        f"{name} is {actual}, but config.json has {expected}"
        for name, expected, actual in mismatches(dims_of(read_json(home / "config.json")), vars(args))
        if name != "mtp_num_layers" or getattr(args, name, None)
    ]
    if lines:
        message = f"{len(lines)} model argument(s) do not describe the model of {home}"
        hint = f"correct the launch by `ckptkit inspect {home} --megatron-args`, or pass the right directory"
        raise CkptkitError(message, hint, lines)


def before_log_prob(args: Namespace, model: Sequence[torch.nn.Module], store_prefix: str) -> None:
    """`--custom-megatron-before-log-prob-hook-path`: this rank's parameters are finite, and its routers not constant.

    The first call, before any training step, also compares them with the loaded checkpoint (`--load`, `--ref-load` or
    `--opd-teacher-load`): all norms and routers, and CKPTKIT_COMPARED_PARAMETERS (16, or `all`) others. Rank 0 reports
    the result. Later calls take one pass over the parameters on their device. Raises CkptkitError naming parameters.
    """
    _require_alive(model, f"before {store_prefix or 'actor '}log-probabilities")
    seen = vars(args).setdefault(_COMPARED, [])  # the arguments exist as long as the job
    if store_prefix not in seen and _TRAINED not in seen:
        seen.append(store_prefix)
        _compare_loaded(args, model, store_prefix)


def before_train_step(
    args: Namespace,
    rollout_id: int,
    step_id: int,
    model: Sequence[torch.nn.Module],
    optimizer: Any,
    opt_param_scheduler: Any,
) -> None:
    """`--custom-megatron-before-train-step-hook-path`: raises CkptkitError for NaN, infinity and dead routers."""
    vars(args).setdefault(_COMPARED, []).append(_TRAINED)
    _require_alive(model, f"before step {step_id} of rollout {rollout_id}")


def after_save(args: Namespace, rollout_id: int, checkpoint_dir: str, hf_checkpoint_dir: str | None) -> None:
    """`--custom-megatron-post-save-hook-path` (miles, rank 0): raises CkptkitError unless all headers are sound."""
    home = _hf_checkpoint(args)
    _require_sound(Subject(Path(checkpoint_dir), hf_path=home))
    if hf_checkpoint_dir is not None:
        _require_sound(Subject(Path(hf_checkpoint_dir), source_path=home))


def after_weight_write(args: Namespace, version_dir: str, rollout_engines: Sequence[Any]) -> None:
    """`--custom-update-weight-post-write-path`: a disk update is complete, and no router in it is constant.

    Rank 0 checks a full update (slime) by headers, compared with --hf-checkpoint, and by its routers; a delta by index,
    headers, base version and names. The directory is empty before the first delta. Raises CkptkitError with findings.
    """
    if job_rank() != 0:
        return
    path = Path(version_dir)
    require_own_files(path)
    if not any(path.iterdir()):
        return
    if is_deltas(path):
        require_sound(single_delta(path), HfCheckpoint(_hf_checkpoint(args)).specs)
        return
    _require_sound(Subject(path, source_path=_hf_checkpoint(args)))
    _require_routers(HfCheckpoint(path))


def _hf_checkpoint(args: Namespace) -> Path:
    path = getattr(args, "hf_checkpoint", None)
    if not path or not Path(path).is_dir():
        hint = "pass a local directory with config.json to --hf-checkpoint, or remove ckptkit's hook"
        raise CkptkitError(f"--hf-checkpoint is {path!r}, which is not a directory here", hint)
    require_own_files(path)
    return Path(path)


def _require_sound(subject: Subject) -> None:
    require_own_files(subject.path)
    report = report_of(check_headers(subject), str(subject.path))
    raise_errors(report.checkpoint, report.findings)
    for reason in report.reasons:
        say(f"{subject.path}: not checked: {reason}")


def raise_errors(where: str, findings: Sequence[Finding]) -> None:
    """Raises CkptkitError with the findings that are errors, if any."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        lines = []
        for one in errors:
            place = ", ".join(filter(None, (one.tensor, one.file))) or where
            lines.append(f"{one.code} {place}: {one.actual} (expected {one.expected})")
        hint = f"run `ckptkit verify {where}` for details; {errors[0].hint}"
        raise CkptkitError(f"{where} is not sound, {len(lines)} finding(s)", hint, first_lines(lines))


def _require_routers(checkpoint: HfCheckpoint) -> None:
    """Raises CkptkitError if a router of the checkpoint is constant or not finite, which routes all tokens alike."""
    from ckptkit.verify.evidence.extremes import extremes

    config = adapt_config(checkpoint.config, checkpoint.specs)
    names = [name for rule in rules_of(config) if rule.megatron.endswith(_ROUTER) for name in rule.hf]
    found = {name: extremes(checkpoint.read([name])[name]) for name in names if name in checkpoint.specs}
    if dead := [name for name, one in found.items() if one.constant or not one.finite]:
        hint = "verify the trainer's own checkpoint: this update would route every token to the same experts"
        raise CkptkitError(f"{checkpoint.root}: {summarize(dead)}: all values are equal or not finite", hint)


def _compare_loaded(args: Namespace, model: Sequence[torch.nn.Module], prefix: str) -> None:
    """Raises CkptkitError if the model differs from the loaded checkpoint; only reports if it cannot be compared."""
    from ckptkit.verify.weight_sync.loaded import DiffersError, compare_loaded, locate_loaded, parameters_asked_for

    when = f"before the first {prefix.rstrip('_') or 'actor'} log-probabilities"
    parameters, hf = parameters_asked_for(), getattr(args, "hf_checkpoint", None)
    try:
        outcome = str(compare_loaded(locate_loaded(args, prefix), hf, model, parameters))
    except DiffersError:
        raise
    except CkptkitError as error:
        outcome = f"not compared: {error.message}"
    if job_rank() == 0:
        say(f"{when}: {outcome}")


def _require_alive(model: Sequence[torch.nn.Module], when: str) -> None:
    low_high = dict(_extremes(model))
    bad = [name for name, (low, high) in low_high.items() if not (abs(low) < float("inf") and abs(high) < float("inf"))]
    if bad:
        hint = "find the last checkpoint with finite values: `ckptkit verify CKPT` (CK204)"
        raise CkptkitError(f"{when}: NaN or infinity in {len(bad)} parameter(s): {summarize(bad)}", hint)
    if dead := [name for name, (low, high) in low_high.items() if name.endswith(_ROUTER) and low == high]:
        hint = "run `ckptkit verify CKPT --against-megatron`: such routers send every token to the same experts"
        raise CkptkitError(f"{when}: all values are equal in {summarize(dead)}", hint)


def _extremes(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yields the smallest and largest value of each floating parameter, with one synchronization of the device."""
    import torch

    names, found = list[str](), list[torch.Tensor]()
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if parameter.is_floating_point() and parameter.numel() and parameter.element_size() > 1:
                names.append(name)
                found.append(torch.stack(torch.aminmax(parameter.detach())).float())
    if found:
        yield from zip(names, map(tuple, torch.stack(found).tolist()), strict=True)


_MODEL = "actor_rollout_ref.model.path"


def check_launch(words: Sequence[str]) -> None:
    """Preflight of verl's overrides, if they name a model. Raises CkptkitError with errors; reports the result."""
    settings = {name.lstrip("+"): value for name, _, value in (word.partition("=") for word in words)}
    model = settings.get(_MODEL)
    if not model:
        return
    if not Path(model).is_dir():
        say(f"{model} is not a directory here, so nothing was checked")
        return
    report = preflight(arguments=words)
    raise_errors(report.checkpoint, report.findings)
    say(f"preflight of {report.checkpoint}: {'; '.join([report.status, *report.reasons])}")
