"""CK711 to CK714 and CK717: the paths of a launch hold what each side would load, and all its words are read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from verify.check import Skip, Tally, Unable, check
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.launch.checks.engine import job_of, unless_skipped
from verify.launch.job import Job
from verify.launch.sides import Side

# The fact that lists the words of a launch that matter and are not read.
NOT_READ = "not read"
# A line of `Job.unread` about a variable that nothing sets.
_UNSET = re.compile(r"(?P<words>.+): \$\{?(?P<name>\w+)\}? \(set neither in the script nor in the environment\)")


def _sides(subject: Subject) -> Sequence[Side]:
    """The sides of a launch. Raises Skip where it names no path that is known."""
    if not (sides := job_of(subject).sides):
        raise Skip("the launch names no path that is known")
    return sides


def _issues(subject: Subject, tally: Tally, option: str) -> Iterator[Issue]:
    """What is wrong with the path of an option, once for all sides that load it."""
    sides = _sides(subject)
    tally.compared(0, len(sides))
    yield from dict.fromkeys(issue for side in sides for about, issue in side.issues if about == option)


@check(
    "CK711",
    "--load is what the actor loads",
    stage="launch",
    rationale=(
        "Where --load has no tracker file, the actor takes --ref-load silently: "
        "a resumed run starts again, or from the wrong weights."
    ),
    fix="Give the directory that holds latest_checkpointed_iteration.txt, not one of its iterations.",
    unless=unless_skipped(_sides),
)
def load_found(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """`--load` has a tracker that resolves, or is a supported HF directory; an empty one is a warning."""
    yield from _issues(subject, tally, "--load")


@check(
    "CK712",
    "--ref-load is what the reference loads",
    stage="launch",
    rationale=(
        "Of an iteration directory, which has no tracker, Megatron makes random weights with a warning: "
        "the KL term pulls towards noise. Others stop."
    ),
    fix="Give the directory that `ckptkit convert` wrote, the one with latest_checkpointed_iteration.txt.",
    unless=unless_skipped(_sides),
)
def reference_found(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """`--ref-load` has a tracker that resolves, or is a supported HF directory; so have a critic's and a teacher's."""
    for option in ("--ref-load", "--critic-load", "--opd-teacher-load"):
        yield from _issues(subject, tally, option)


@check(
    "CK713",
    "--ckpt-step is an iteration that is there",
    stage="launch",
    rationale=(
        "--ckpt-step replaces what the tracker says; "
        "an iteration that was deleted since is found missing only after the job started."
    ),
    fix="Choose an iteration that is there, or leave --ckpt-step out.",
    unless=unless_skipped(_sides),
)
def step_found(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The directory `iter_N` of `--ckpt-step N`."""
    yield from _issues(subject, tally, "--ckpt-step")


@check(
    "CK714",
    "--hf-checkpoint is an HF directory",
    stage="launch",
    rationale="The rollout engine and the tokenizer come from it; engine and trainer must hold the same model.",
    fix="Give the HF directory of the model that --load or --ref-load was converted from.",
    unless=unless_skipped(_sides),
)
def rollout_found(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """`--hf-checkpoint` has a config.json."""
    yield from _issues(subject, tally, "--hf-checkpoint")


def _words(subject: Subject) -> Job:
    job = job_of(subject)
    if not (job.text.words or job.unread or job.written):
        raise Skip("no launch arguments were given")
    return job


@check(
    "CK717",
    "every path and size among the launch arguments is read",
    stage="launch",
    rationale=(
        "A size that only a configuration file or an override says is not the one that was looked at: "
        "the job may stop after the GPUs were booked."
    ),
    fix=(
        "Give paths and sizes as options of preflight, or as the options of Megatron-LM, slime and SGLang, and set a "
        "variable that the script does not set in the environment (`NUM_GPUS=8 ckptkit preflight run.sh`); "
        "the reasons say which words were not read."
    ),
    unless=unless_skipped(_words),
)
def arguments_read(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Options that name a checkpoint, a parallel size or a file of settings, and overrides as Hydra has them."""
    job = _words(subject)
    tally.compared(0, len(job.text.words) or 1)
    for note in job.notes:
        tally.note(note)
    if lines := job.unread:
        reason, tally.facts[NOT_READ] = _unread(lines)
        raise Unable(f"not read {job.stack.where}: {reason}")
    yield from ()


def _unread(lines: Sequence[str]) -> tuple[str, list[str]]:
    """Why words were not read, a variable that is not set once; and a line for all words of a variable, or for each."""
    unset: dict[str, list[str]] = defaultdict(list)
    others = []
    for line in lines:
        if match := _UNSET.fullmatch(line):
            unset[match["name"]].append(match["words"])
        else:
            others.append(line)
    if not unset:
        more = f", and {len(others) - 1} more" if others[1:] else ""
        return f"{others[0]}{more}", others
    names = ", ".join(f"${{{name}}}" for name in unset)
    more = f", and {len(others)} more" if others else ""
    setting = " ".join(f"{name}=VALUE" for name in unset)
    reason = f"{names} (set neither in the script nor in the environment){more}; set it first: export {setting}"
    return reason, [*(", ".join(words) for words in unset.values()), *others]
