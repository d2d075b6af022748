"""`preflight` of a job of verl, NeMo-RL or ROLL: everything it looks at follows from the settings of the job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from verify.evidence.subject import Subject
from verify.launch.arguments import LaunchArguments
from verify.launch.judge import judged
from verify.launch.launch import Launch
from verify.launch.stacks.launched import ENGINE, Stacked
from verify.launch.stacks.which import agreed
from verify.launch.words import LaunchText
from verify.options import VerifyOptions
from verify.report import Report


def preflight_stack(
    stacked: Stacked,
    text: LaunchText,
    load: Path | None = None,
    ref_load: Path | None = None,
    ckpt_step: int | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Report:
    """The report of a job by its settings; `text` is what its command line says.

    Paths and `sizes` (tp, pp, ep) that preflight was given may only confirm them.

    Raises CkptkitError where they say something else.
    """
    if ckpt_step is not None:
        raise CkptkitError(f"--ckpt-step does not go with settings of {stacked.name}", "give the step in the settings")
    agreed(stacked, load, ref_load)
    actor = stacked.sizes.get("actor", LaunchArguments())
    for name, given in (sizes or {}).items():
        said = getattr(actor, name)
        if given != 1 and said is not None and given != said:
            raise CkptkitError(f"--{name} {given}, but by the settings of the job it is {said}", f"leave --{name} out")
    launch = Launch(stacked.hf, text=text, stack=stacked)
    launched = Subject(stacked.hf or Path(), launch=launch, arguments=actor)
    return judged(launched, stacked.sides, _subjects(stacked))


def _subjects(stacked: Stacked) -> Iterator[Subject]:
    """Each directory once for all sides that cut it alike. The model's config judges Megatron's weights."""
    seen: set[tuple[Path, LaunchArguments]] = set()
    paths: set[Path] = set()
    for side in stacked.sides:
        options = stacked.sizes.get(side.role, LaunchArguments())
        if side.path is None or (side.path, options) in seen or (side.role == ENGINE and side.path in paths):
            continue
        seen.add((side.path, options))
        paths.add(side.path)
        model = stacked.models.get(side.role, stacked.hf)
        tp, pp, ep = options.tp or 1, options.pp or 1, options.ep or 1
        yield Subject(
            side.path,
            hf_path=model if side.kind == "megatron" else None,
            source_path=model if side.kind == "hf" and side.path != model else None,
            arguments=options,
            options=VerifyOptions(
                tp=tp, pp=pp, ep=ep, etp=options.etp or tp, readers=("vllm",) if options.server == "vllm" else None
            ),
        )
