"""The nodes that teachers of NeMo-RL's on-policy distillation have for themselves.

Source: NeMo-RL `algorithms/opd.py` and `models/policy/teacher_worker_group.py`, as of 2026-08: one group of workers a
teacher; of several names for one checkpoint the first counts.
"""

from __future__ import annotations

from verify.launch.settings.config import UnresolvedError
from verify.launch.settings.yaml_tree import Tree
from verify.launch.stacks.settings import Settings
from verify.launch.words import Word

_OPD = "on_policy_distillation"
_APART = f"{_OPD}.non_colocated_teachers"


def teacher_nodes(settings: Settings) -> int | None:
    """How many nodes they take from the policy's; None where that is not known."""
    if not (settings.switch(f"{_OPD}.enabled") and settings.switch(f"{_APART}.enabled")):
        return 0
    try:
        names = settings.config.find(f"{_OPD}.teacher_model_by_agent_name")
    except UnresolvedError:
        return None
    each = settings.number(f"{_APART}.default_teacher_cfg.num_nodes", 1)
    counted = settings.switch(f"{_OPD}.deduplicate_shared_teacher_checkpoints", True)
    total, seen = 0, set[str]()
    for name, model in names.items() if isinstance(names, dict) else ():
        path = _text(model)
        if counted and path in seen:
            continue
        seen.add(path)
        own = settings.number(f"{_APART}.teacher_overrides.{name}.num_nodes", each)
        if own is None:
            return None
        total += own
    return total


def _text(model: Tree) -> str:
    return model.text if isinstance(model, Word) else ""
