"""`preflight`: before GPUs are booked, which weights each side of a job would load, and whether they belong together.

Headers and JSON files only: it takes seconds, whatever the size of the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import refuse_url
from verify.checks.launch.int4_training import updates
from verify.evidence.subject import Subject
from verify.launch.arguments import LaunchArguments
from verify.launch.judge import judged
from verify.launch.launch import Launch, sides_of
from verify.launch.sides import Side
from verify.launch.stacked import preflight_stack
from verify.launch.stacks.which import read_stack
from verify.launch.words import Word
from verify.report import Report


def preflight(
    hf_checkpoint: str | Path | None = None,
    load: str | Path | None = None,
    ref_load: str | Path | None = None,
    ckpt_step: int | None = None,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    arguments: Sequence[str] = (),
    config: str | Path | None = None,
) -> Report:
    """Reports what a launch would load, and what headers and JSON files show to be wrong; reads no weight.

    `arguments` are those of the launch script, of which the ones about parallel sizes and INT4 training are read;
    variables of INT4 training count in the environment too. Where others name a size or a path, the report is
    inconclusive. `config` is the YAML file of a job of verl, NeMo-RL or ROLL; `arguments` may then override its
    settings, and be such overrides alone. Raises CkptkitError when nothing is given or a path is a URL, and when a
    size is given twice, differently.
    """
    for path in (given for given in (hf_checkpoint, load, ref_load) if given):
        refuse_url(path)
    hf, actor, reference = (Path(path) if path else None for path in (hf_checkpoint, load, ref_load))
    words = [Word(text) for text in arguments]
    if stacked := read_stack(words, Path(config) if config else None, os.environ, hf):
        return preflight_stack(stacked, words, actor, reference, ckpt_step, {"tp": tp, "pp": pp, "ep": ep})
    if hf is None and actor is None and reference is None:
        raise CkptkitError("nothing to look at", "give at least one of --hf-checkpoint, --load and --ref-load")
    launch = Launch(hf, actor, reference, ckpt_step, tuple(arguments))
    options = LaunchArguments.read(arguments, os.environ)
    tp, pp, ep = (
        _agreed(name, given, said)
        for name, given, said in (("tp", tp, options.tp), ("pp", pp, options.pp), ("ep", ep, options.ep))
    )
    # Megatron's default is that of tp; where the launch was not read as a whole, nobody knows.
    etp = options.etp or (tp if arguments and not launch.unread else None)
    sides = sides_of(launch)
    launched = Subject(hf or actor or reference or Path(), launch=launch, arguments=options)
    subjects = (
        replace(one, arguments=options, etp=etp, updated=updates(launch, options))
        for one in _subjects(sides, hf, tp, pp, ep)
    )
    return judged(launched, sides, subjects)


def _agreed(name: str, given: int, said: int | None) -> int:
    """A parallel size, by option or among the launch arguments."""
    if said is not None and given not in (1, said):
        raise CkptkitError(f"--{name} {given}, but the launch arguments say {said}", f"leave --{name} out")
    return given if said is None else said


def _subjects(sides: Sequence[Side], hf: Path | None, tp: int, pp: int, ep: int) -> Iterator[Subject]:
    """Each directory once. The rollout's config judges the trainer's weights: the two must hold the same model."""
    seen: set[Path] = set()
    usable = hf if hf and (hf / "config.json").exists() else None
    for side in sides:
        if side.path is None or side.path in seen:
            continue
        seen.add(side.path)
        if side.kind == "megatron":
            yield Subject(side.path, hf_path=usable, tp=tp, pp=pp, ep=ep)
        else:
            yield Subject(side.path, source_path=usable if side.path != usable else None, tp=tp, pp=pp, ep=ep)
