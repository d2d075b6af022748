"""`preflight`: before GPUs are booked, which weights each side of a job would load, and whether they belong together.

Headers, JSON files and samples of weights: it takes seconds, whatever the size of the model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import refuse_url
from ckptkit.formats.hf.hub_cache import hub_model
from verify.checks.launch.int4_training import updates
from verify.evidence.subject import Subject
from verify.launch.arguments import launch_arguments
from verify.launch.judge import judged
from verify.launch.launch import Launch, sides_of
from verify.launch.paths import launch_of
from verify.launch.python.launcher import read_launcher
from verify.launch.shell.read import read_script
from verify.launch.sides import Side
from verify.launch.stacked import preflight_stack
from verify.launch.stacks.which import is_config, read_stack
from verify.launch.words import LaunchText, UnresolvedWord, Word
from verify.options import VerifyOptions
from verify.report import Report

_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def preflight(
    hf_checkpoint: str | Path | None = None,
    load: str | Path | None = None,
    ref_load: str | Path | None = None,
    ckpt_step: int | None = None,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    arguments: Sequence[str] = (),
    script: str | Path | None = None,
    text: LaunchText | None = None,
) -> Report:
    """Reports what a launch would load, and what its words, headers, JSON files and samples of weights show.

    `script` is a launch script of bash, which is read and never run, or the YAML file of a job of verl, NeMo-RL or
    ROLL; `arguments` are the words behind it, or a launch by themselves; `text` is a launch that was read already.
    Paths and sizes that are not given here are the launch's. Variables count in the environment too. Where a launch
    names a size or a path that is not read, or that nobody can tell before it runs, the report is inconclusive. Raises
    CkptkitError when no path is given or one is a URL, when a size is given twice, differently, and when the script is
    no launch.
    """
    config = Path(script) if script and is_config(Path(script)) else None
    if text is None:
        text = _text(None if config else script, arguments)
    for path in (given for given in (hf_checkpoint, load, ref_load) if given):
        refuse_url(path)
    paths = _path(hf_checkpoint), _path(load), _path(ref_load)
    said = {name: word.text for name, word in text.environment.items() if not isinstance(word, UnresolvedWord)}
    environment = {**os.environ, **said}
    hub = hub_model(str(hf_checkpoint), environment) if hf_checkpoint else None
    if stacked := read_stack(text.words, config, environment, hub.path if hub else paths[0]):
        if hub and hub.path is None:
            raise CkptkitError(f"--hf-checkpoint {hub.name}: {hub.why}", "give a local copy of it")
        return preflight_stack(stacked, text, *paths[1:], ckpt_step, {"tp": tp, "pp": pp, "ep": ep})
    launch, notes = launch_of(text, *paths, ckpt_step, environment)
    if not (launch.hf_checkpoint or launch.hub or launch.load or launch.ref_load or text.unresolved or text.issues):
        hint = "give at least one of --hf-checkpoint, --load and --ref-load, or a launch script"
        raise CkptkitError("nothing to look at", hint)
    options = launch_arguments(launch.given, text.words, environment)
    tp, pp, ep = (
        _agreed(name, given, said)
        for name, given, said in (("tp", tp, options.tp), ("pp", pp, options.pp), ("ep", ep, options.ep))
    )
    # Megatron's default is that of tp; where the launch was not read as a whole, nobody knows.
    etp = options.etp or (tp if text.words and not launch.unread else None)
    sides = sides_of(launch)
    hf = launch.hf_checkpoint
    # In mode bridge miles packs what the checkpoint stores packed, whatever its `ignore` list says.
    updated = None if launch.bridge else updates(launch, options)
    readers = ("vllm", "slime") if options.server == "vllm" else None
    launched = Subject(hf or launch.load or launch.ref_load or Path(), launch=launch, arguments=options)
    cut = VerifyOptions(tp=tp, pp=pp, ep=ep, etp=etp, readers=readers)
    subjects = (
        replace(one, options=cut, arguments=options, updated=updated, sizes_at=_sizes_at(launch))
        for one in _subjects(sides, hf)
    )
    return judged(launched, sides, subjects, notes)


def _path(given: str | Path | None) -> Path | None:
    return Path(given) if given else None


def _text(script: str | Path | None, arguments: Sequence[str]) -> LaunchText:
    """The launch of a script, of text on standard input (`-`), or of words alone."""
    if script is None:
        return LaunchText(tuple(Word(word) for word in arguments))
    if str(script) == "-":
        return read_script(None, sys.stdin.read(), arguments, os.environ)
    if Path(script).suffix == ".py":
        return read_launcher(Path(script), arguments, os.environ)
    return read_script(Path(script), None, arguments, os.environ)


def _agreed(name: str, given: int, said: int | None) -> int:
    """A parallel size, by option or among the launch arguments."""
    if said is not None and given not in (1, said):
        raise CkptkitError(f"--{name} {given}, but the launch arguments say {said}", f"leave --{name} out")
    return given if said is None else said


def _sizes_at(launch: Launch) -> dict[str, Word]:
    """The words of a launch that give the parallel sizes."""
    return {name: launch.given.places[one] for name, one in _SIZES.items() if one in launch.given.places}


def _subjects(sides: Sequence[Side], hf: Path | None) -> Iterator[Subject]:
    """Each directory once. The rollout's config judges the trainer's weights: the two must hold the same model."""
    seen: set[Path] = set()
    usable = hf if hf and (hf / "config.json").exists() else None
    for side in sides:
        # A critic has another output layer, a teacher is another model.
        if side.path is None or side.path in seen or side.role in ("critic", "teacher"):
            continue
        seen.add(side.path)
        if side.kind == "megatron":
            yield Subject(side.path, hf_path=usable)
        else:
            yield Subject(side.path, source_path=usable if side.path != usable else None)
