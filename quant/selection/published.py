"""`ignore` lists as releases have them: made for engines, and not for a trainer that packs by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from quant.selection.class_tree import ClassTree

_KIMI = frozenset({"lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"})
_KIMI_VISION = _KIMI | {"re:vision_tower.*", "re:mm_projector.*"}

# By model_type. Source: config.json of moonshotai/Kimi-K2-Thinking (in which Kimi K2 is a DeepSeek V3), Kimi-K2.5 and Kimi-K2.6.
_LISTS: Mapping[str, tuple[frozenset[str], ...]] = MappingProxyType(
    {
        "deepseek_v3": (_KIMI,),
        "kimi_k2": (_KIMI,),
        "kimi_k25": (_KIMI, _KIMI_VISION, _KIMI_VISION - {"lm_head"} | {"re:.*lm_head.*"}),
    }
)


def is_published(model_type: str, ignore: Sequence[str], tree: ClassTree) -> bool:
    """Whether the list is one of a known release, or is written out as llm-compressor saves it.

    Written out: whole module names and no pattern, the head and every router among them.
    """
    if frozenset(ignore) in _LISTS.get(model_type, ()):
        return True
    routers = tree.gates | {name for name in tree.others if ".layers." in f".{name}"}
    return not any(entry.startswith("re:") for entry in ignore) and {tree.head, *routers} <= set(ignore)
