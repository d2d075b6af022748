"""`preflight`: before GPUs are booked, which weights each side of a job would load, and whether they belong together.

Headers, JSON files and samples of weights: it takes seconds, whatever the size of the model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from ckptkit.core.isolation import HIDDEN, is_secret
from ckptkit.formats.detect import refuse_url
from verify.launch.job import Given, Launch
from verify.launch.judge import judged
from verify.launch.python.launcher import read_launcher
from verify.launch.shell.read import read_script
from verify.launch.stacks.which import is_config, read_job
from verify.launch.words import LaunchText, UnresolvedWord, Word
from verify.report import Report


class GivenSizes(TypedDict, total=False):
    """The iteration and the parallel sizes that preflight is given itself."""

    ckpt_step: int | None
    tp: int
    pp: int
    ep: int


def preflight(
    hf_checkpoint: str | Path | None = None,
    load: str | Path | None = None,
    ref_load: str | Path | None = None,
    arguments: Sequence[str] = (),
    script: str | Path | None = None,
    text: LaunchText | None = None,
    **sizes: Unpack[GivenSizes],
) -> Report:
    """Reports what a launch would load, and what its words, headers, JSON files and samples of weights show.

    `script` is a launch script of bash, which is read and never run, or the YAML file of a job of verl, NeMo-RL or
    ROLL; `arguments` are the words behind it, or a launch by themselves; `text` is a launch that was read already.
    Paths and `sizes` (ckpt_step, tp, pp, ep) that are not given here are the launch's. Variables count in the
    environment too. Where a launch names a size or a path that is not read, or that nobody can tell before it runs, the
    report is inconclusive. Raises CkptkitError when no path is given or one is a URL, when a size is given twice,
    differently, and when the script is not a launch.
    """
    # What a script of others names may be shown: values that may be secrets stay unknown to all that read a launch.
    environment = {name: HIDDEN if is_secret(name, value) else value for name, value in os.environ.items()}
    config = Path(script) if script and is_config(Path(script)) else None
    if text is None:
        text = _text(None if config else script, arguments, environment)
    for path in (given for given in (hf_checkpoint, load, ref_load) if given):
        refuse_url(path)
    known = {name: word.text for name, word in text.environment.items() if not isinstance(word, UnresolvedWord)}
    paths = Path(load) if load else None, Path(ref_load) if ref_load else None
    given = Given(hf_checkpoint or None, *paths, **sizes)
    return judged(read_job(Launch(text, given, {**environment, **known}), config))


def _text(script: str | Path | None, arguments: Sequence[str], environment: Mapping[str, str]) -> LaunchText:
    """The launch of a script, of text on standard input (`-`), or of words alone."""
    if script is None:
        return LaunchText(tuple(Word(word) for word in arguments))
    if str(script) == "-":
        return read_script(None, sys.stdin.read(), arguments, environment)
    if Path(script).suffix == ".py":
        return read_launcher(Path(script), arguments, environment)
    return read_script(Path(script), None, arguments, environment)
