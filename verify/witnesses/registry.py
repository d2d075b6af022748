"""Every witness: its option, the witnesses that it implies, and its program."""

from __future__ import annotations

from dataclasses import dataclass

from ckptkit.verify.witnesses.loading.engine import EngineFacts
from ckptkit.verify.witnesses.sglang.facts import SGLANG
from ckptkit.verify.witnesses.vllm.facts import VLLM

ENGINES = (SGLANG, VLLM)  # to add one, see docs/architecture.md


@dataclass(frozen=True)
class Witness:
    name: str  # in `against`, and in the `needs` of a check
    option: str  # of the command line
    program: str | None = None  # mentioned in the verdict if it was not run
    looks_at: str | None = None  # the verdict's name of the stage of its checks, if it has one
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
    """The engine that serves the checkpoint: vLLM if only its loading is checked too, otherwise SGLang."""
    return VLLM if VLLM.name in against and SGLANG.name not in against else SGLANG


def with_implied(against: frozenset[str]) -> frozenset[str]:
    return against | {one.implies for one in WITNESSES if one.name in against and one.implies}


def programs_not_used(against: frozenset[str]) -> list[str]:
    used = {one.program for one in WITNESSES if one.name in against}
    used |= {live_engine(against).label} if "engine" in against else set()
    return [one for one in dict.fromkeys(one.program for one in WITNESSES) if one is not None and one not in used]
