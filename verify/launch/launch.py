"""What each side of a training job would really load, by the rules of its trainer; no weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ckptkit.formats.detect import TRACKER
from ckptkit.formats.hf.hub_cache import HubModel
from verify.launch import slime
from verify.launch.options.argv import options_of
from verify.launch.options.given import GivenArguments, given_arguments
from verify.launch.options.tables import MODULES
from verify.launch.role_files import RoleFiles, role_files
from verify.launch.sides import Side
from verify.launch.slime import ROLLOUT
from verify.launch.stacks.launched import Stacked
from verify.launch.stacks.which import unresolved_besides
from verify.launch.unread import unread
from verify.launch.words import LaunchText, known_words


@dataclass(frozen=True)
class Launch:
    """The paths of a launch, and what else it says.

    `ref_step`: the iteration of the reference, where it has an option of its own. `critic` and `teacher`: what a critic
    and a teacher of on-policy distillation load. `stack`: what the settings of verl, NeMo-RL or ROLL say, from which
    everything else then follows. `hub`: the name on a model hub that --hf-checkpoint gives; `hf_checkpoint` is then its
    snapshot in the local cache, or None.
    """

    hf_checkpoint: Path | None = None
    load: Path | None = None
    ref_load: Path | None = None
    ckpt_step: int | None = None
    text: LaunchText = field(default_factory=LaunchText)
    ref_step: int | None = None
    critic: Path | None = None
    teacher: Path | None = None
    teacher_step: int | None = None
    stack: Stacked | None = None
    hub: HubModel | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """The words that are known, as texts."""
        return tuple(word.text for word in known_words(self.text.words))

    @property
    def given(self) -> GivenArguments:
        """The arguments of Megatron, slime and the engine, as the words and `--custom-config-path` set them."""
        return given_arguments(self.text.words, self.files.common)

    @property
    def program(self) -> str:
        """The file or module that starts the trainer, `train_async.py`; "" where it is not known."""
        named = self.text.program or next((word for word in self.words if word.endswith(".py")), "")
        return named.rpartition("/")[2]

    @cached_property
    def files(self) -> RoleFiles:
        """What files of settings of slime and miles say, as far as they are there."""
        return role_files(self.text.words)

    @property
    def mode(self) -> str | None:
        """How miles loads and sends weights, raw or bridge; None where the launch does not say it, or is slime's."""
        return str(self.given.values["megatron_to_hf_mode"]) if "megatron_to_hf_mode" in self.given.values else None

    @property
    def notes(self) -> list[str]:
        """Remarks on what this launch loads."""
        if self.stack:
            return list(self.stack.notes)
        notes = []
        if self.mode is None and any(side.kind == "hf" and side.role != ROLLOUT for side in sides_of(self)):
            notes.append("slime loads the HF directory itself; miles does so with --megatron-to-hf-mode bridge only")
        if self.critic:
            notes.append("--critic-load is an option of miles; slime passes over it and reads --megatron-config-path")
        return notes

    @property
    def bridge(self) -> bool:
        """Whether miles builds and loads the model by Megatron-Bridge, from `--hf-checkpoint`."""
        return self.mode == "bridge"

    @property
    def unjudged(self) -> list[str]:
        """The options among the words that have code of their own build the model."""
        return [one.word.text for one in options_of(self.text.words) if one.name in MODULES]

    @property
    def unread(self) -> list[str]:
        """A line for everything among the words that matters and is not read, or not known."""
        if self.stack:
            return [*self.stack.unread, *unresolved_besides(self.text)]
        named = {
            "--hf-checkpoint": self.hf_checkpoint or self.hub,
            "--load": self.load,
            "--ref-load": self.ref_load,
            "--ckpt-step": self.ckpt_step,
            "--ref-ckpt-step": self.ref_step,
            "--critic-load": self.critic,
            "--opd-teacher-load": self.teacher,
            "--opd-teacher-ckpt-step": self.teacher_step,
        }
        given = frozenset(option for option, value in named.items() if value is not None)
        lines = [line for line in unread(self.words, given) if line.partition(" ")[0] not in self.files.read]
        download = [f"--hf-checkpoint {self.hub.name}: {self.hub.why}"] if self.hub and self.hub.path is None else []
        return [*download, *lines, *self.files.unread, *self.text.unresolved]


def sides_of(launch: Launch) -> list[Side]:
    """Every side that the launch says something about."""
    if launch.stack:
        return list(launch.stack.sides)
    return [*_trainers(launch), *_rollout(launch)]


def _rollout(launch: Launch) -> list[Side]:
    if launch.hf_checkpoint is None:
        return [_download(launch.hub, ROLLOUT)] if launch.hub else []
    side = slime.rollout(launch.hf_checkpoint)
    return [replace(side, why=f"--hf-checkpoint {launch.hub.why}") if launch.hub else side]


def _download(hub: HubModel, role: str) -> Side:
    """A side whose weights are downloaded at the start."""
    return Side(role, None, None, f"--hf-checkpoint {hub.name} is {hub.why}", elsewhere=True)


def _trainers(launch: Launch) -> Iterator[Side]:
    """Actor, reference, critic and teacher, as far as the launch gives them something to load."""
    load, ref_load, step, mode = launch.load, launch.ref_load, launch.ckpt_step, launch.mode
    fallback = ref_load or (launch.hf_checkpoint if launch.bridge else None)
    option = "--ref-load" if ref_load else "--hf-checkpoint"
    # Whoever falls back to the reference takes its step, and lends it to roles without one; not in mode bridge.
    falls_back = load is None or not (load / TRACKER).exists()
    shared = launch.ref_step if falls_back and launch.ref_step is not None and not launch.bridge else step
    if launch.bridge and launch.hub and fallback is None and falls_back:
        yield _download(launch.hub, "actor")
    elif load or ref_load or (fallback and launch.text.words) or launch.files.path("actor", "load"):
        side = slime.actor(load, fallback, shared, option=option, mode=mode)
        yield _of_file(launch, "actor", "load", "--load", shared) or side
    reference = shared if launch.ref_step is None else launch.ref_step
    if said := _of_file(launch, "reference", "ref_load", "--ref-load", reference):
        yield said
    elif ref_load:
        yield slime.trainer("reference", "--ref-load", ref_load, reference, mode)
    if said := _of_file(launch, "critic", "load", "--critic-load", shared):
        yield said
    elif launch.critic:
        yield slime.trainer("critic", "--critic-load", launch.critic, shared)
    if launch.teacher:
        yield slime.trainer(
            "teacher",
            "--opd-teacher-load",
            launch.teacher,
            shared if launch.teacher_step is None else launch.teacher_step,
            mode,
        )


def _of_file(launch: Launch, role: str, name: str, option: str, step: int | None) -> Side | None:
    """The side whose path a file of settings gives; None where none does. The actor's file gives the reference's."""
    files, of = launch.files, "actor" if role == "reference" else role
    word = files.path(of, name)
    if word is None or (role == "critic" and "critic" not in files.roles):
        return None
    own = files.step(of, "ref_ckpt_step") if role == "reference" else None
    steps = [own, files.step(of, "ckpt_step"), step]
    side = slime.trainer(
        role, option, Path(word.text), next((one for one in steps if one is not None), None), launch.mode
    )
    return replace(side, why=f"{side.why} ({name} at {word.place})")
