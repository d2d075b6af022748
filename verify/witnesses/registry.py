"""Every witness: what asks for it, what it implies, and which program it asks."""

from __future__ import annotations

from dataclasses import dataclass

from ckptkit.verify.witnesses.loading.engine import EngineFacts
from ckptkit.verify.witnesses.sglang.facts import SGLANG
from ckptkit.verify.witnesses.vllm.facts import VLLM

ENGINES = (SGLANG, VLLM)  # whose loading is checked; to add one, see docs/architecture.md


@dataclass(frozen=True)
class Witness:
    """Something that verification asks where it is told to."""

    name: str  # in `against`, and in what a check needs
    option: str  # of the command line
    program: str | None = None  # whose absence the verdict mentions
    looks_at: str | None = None  # the stage of its checks, as the verdict names it; None: it has no stage of its own
    implies: str | None = None  # another witness


WITNESSES = (
    Witness("megatron", "--against-megatron", "Megatron", "Megatron"),
    *(Witness(one.name, f"--against-{one.name}", one.label, one.label) for one in ENGINES),
    Witness("transformers", "--against-transformers", looks_at="transformers"),
    Witness("engine", "--engine", looks_at="engine"),
    Witness("update", "--update", implies="engine"),
    Witness("release-resume", "--release-resume", implies="engine"),
    Witness("logits", "--logits"),
)


def live_engine(against: frozenset[str]) -> EngineFacts:
    """The engine that serves the checkpoint: vLLM where it is the one that is asked, else SGLang."""
    return VLLM if VLLM.name in against and SGLANG.name not in against else SGLANG


def with_implied(against: frozenset[str]) -> frozenset[str]:
    """The witnesses asked for, with those that they imply."""
    return against | {one.implies for one in WITNESSES if one.name in against and one.implies}


def programs_not_used(against: frozenset[str]) -> list[str]:
    """The programs that none of these witnesses asks."""
    asked = {one.program for one in WITNESSES if one.name in against}
    asked |= {live_engine(against).label} if "engine" in against else set()
    return [one for one in dict.fromkeys(one.program for one in WITNESSES) if one is not None and one not in asked]
