"""What a job of slime, miles, vime, Relax or Megatron-LM is, by the options of its launch.

Source: slime `utils/arguments.py`, miles `utils/arguments.py`, and what the modules beside this one name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from verify.issue import Issue
from verify.launch.arguments import LaunchArguments, launch_arguments
from verify.launch.job import Job, Launch, Stack
from verify.launch.options.argv import options_of
from verify.launch.options.given import GivenArguments, given_arguments
from verify.launch.options.names import names, trainer_options
from verify.launch.options.speculative import of_options
from verify.launch.sides import Side, is_trained
from verify.launch.stacks.directories import config_in
from verify.launch.stacks.sizes import NAMES
from verify.launch.stacks.slime.combinations import Run, combination_issues
from verify.launch.stacks.slime.gpus import placement_of
from verify.launch.stacks.slime.sides import Paths, notes_of, role_files, sharing_of, sides_of, unread_of
from verify.launch.words import LaunchText, UnresolvedWord, Word

_CUTS = ("tp", "pp", "ep", "etp")
# A launch that gives one of these is of slime, miles or vime.
_TRAINERS = frozenset(
    {
        *("rollout_batch_size", "actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus_per_engine"),
        *("n_samples_per_prompt", "num_rollout", "advantage_estimator"),
    }
)


def read(launch: Launch) -> Job:
    """The job of a launch by options. Raises CkptkitError where nothing is given, and for values that are not read."""
    text = launch.text
    files = role_files(text.words)
    given = given_arguments(text.words, files.common)
    mode = str(given.values["megatron_to_hf_mode"]) if "megatron_to_hf_mode" in given.values else None
    paths = Paths.read(launch, files, mode, given.values.get("train_backend") == "fsdp")
    if not (paths.hf or paths.hub or paths.load or paths.ref_load or text.unresolved or text.issues):
        hint = "give at least one of --hf-checkpoint, --load and --ref-load, or a launch script"
        raise CkptkitError("nothing to look at", hint)
    sides, unread = sides_of(launch, paths), unread_of(launch, paths)
    sizes = _sizes(launch, given, whole=bool(text.words) and not unread)
    updates = bool(sizes.qat or paths.load or paths.ref_load)
    return Job(
        STACK,
        text,
        next((path for path in (paths.hf, paths.load, paths.ref_load) if path), Path()),
        sides,
        paths.hf,
        sizes=dict.fromkeys(["actor", *(side.role for side in sides)], sizes),
        sizes_at={name: given.places[one] for name in _CUTS if (one := NAMES[name]) in given.places},
        sharing=sharing_of(paths, sides),
        placement=placement_of(given, text.words, text.ranks),
        speculation=of_options(given, text.words),
        updates=updates,
        arguments=given,
        written=_written(text),
        combinations=_combinations(text, paths, _resumed(paths, sides)),
        unread=unread,
        notes=notes_of(paths, sides),
        replaced=paths.replaced,
    )


def _sizes(launch: Launch, given: GivenArguments, whole: bool) -> LaunchArguments:
    """The sizes of every role: preflight's own where the words give none.

    Megatron's default of etp is tp; where the launch was not read as a whole, nobody knows.
    """
    found = launch_arguments(given, launch.text.words, launch.environment)
    tp, pp, ep = (getattr(found, name) or size for name, size in launch.given.sizes.items())
    return replace(found, tp=tp, pp=pp, ep=ep, etp=found.etp or (tp if whole else None))


def _written(text: LaunchText) -> dict[str, Word]:
    """The options that a launch writes, and where each stands first."""
    found: dict[str, Word] = {}
    for option in options_of(text.words):
        if not isinstance(option.word, UnresolvedWord):
            found.setdefault(option.name, option.word)
    return found


def _resumed(paths: Paths, sides: Sequence[Side]) -> int:
    """The iteration of `--load` that the actor goes on from; 0 where it starts anew, as from `--ref-load`."""
    actor = next((side for side in sides if side.role == "actor" and is_trained(side)), None)
    return int(actor.path.name[5:]) if actor and actor.path and actor.path.parent == paths.load else 0


def _combinations(text: LaunchText, paths: Paths, resumed: int) -> tuple[Issue, ...] | None:
    """Options that do not go together. slime judges the words before --custom-config-path sets anything."""
    given = given_arguments(text.words)
    if _TRAINERS.isdisjoint(given.places):
        return None
    return tuple(combination_issues(Run(given, text.program_name, _is_miles(text), config_in(paths.hf), resumed)))


def _is_miles(text: LaunchText) -> bool:
    """Whether an option is given that of these trainers only miles has."""
    miles, *others = (names(one).every for one in ("miles", "slime", "megatron-lm", "sglang-router"))
    given = {one.name.removeprefix("--") for one in options_of(text.words)}
    return not given.isdisjoint(miles.difference(*others))


STACK = Stack(
    "slime",
    read,
    trainer_options,
    "slime passes over what it does not know, miles and Megatron-LM stop",
    where="among the launch arguments",
    one_model=True,
    vllm_readers=("vllm", "slime"),
)
