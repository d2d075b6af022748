"""How releases spell the modules of models: where names begin, which layers are drafts, what lies outside the language model.

transformers knows the classes of a model; for some it spells the modules otherwise than the files do, and for some it has the
language model alone. Source: the published checkpoints' indexes, and `converters/families`, which is held against them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ckptkit.core.errors import CkptkitError


@dataclass(frozen=True)
class Draft:
    """A multi-token prediction layer, for which transformers has no classes: the beginning of its names in the release and in SGLang,

    and the entry of `ignore` that leaves it out for every reader. `sglang` is None where SGLang's names cannot be told from the model's.
    `layer`: the beginning of its decoder layer's names. `joint`: its module that joins the embedding and the hidden state.
    """

    prefix: str
    sglang: str | None
    entry: str
    layer: str
    joint: str


@dataclass(frozen=True)
class Released:
    """A released model. `model_type`: transformers' class for its language model, whose sizes lie in `text_config` when `nested`.

    `root` stands before that class's names and `head` is the output embedding. `moe`: the block with the experts, whose
    projections are named `experts` (gate, up, down). `outside`: beginnings of modules that are no part of the language model.
    `drafts`: how draft layers are spelled, if there are any. `whole`: whether transformers has a class for all of it, with what is outside.
    """

    model_type: str
    root: str = "model."
    head: str = "lm_head"
    nested: bool = False
    moe: str = "mlp"
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    outside: tuple[str, ...] = ()
    drafts: str = "appended"
    whole: bool = False

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config of the language model. Raises CkptkitError when it is not where it should be."""
        text = config.get("text_config") if self.nested else config
        if not isinstance(text, Mapping):
            raise CkptkitError(
                f"config.json: {config.get('model_type')} has no text_config", "restore config.json from the release"
            )
        return text

    def name(self, module: str) -> str:
        """The name in the release of a module of transformers' class."""
        return self.root + module.replace(".mlp.", f".{self.moe}.")

    @property
    def own_root(self) -> str:
        """What stands before the names of the language model's class inside transformers' whole model."""
        return "model.language_model." if self.nested else "model."

    def spellings_outside(self, module: str) -> set[str]:
        """Names under which lists know a module outside the language model, of its name in transformers' whole model without the head.

        transformers writes `model.` before it. Up to 4.57 it had the layers of Gemma's tower under `vision_model`, as the release has them.
        """
        released = re.sub(r"^vision_tower\.(?!vision_model\.)", "vision_tower.vision_model.", module)
        return {f"model.{module}", f"model.{released}"} | {
            name for name in (module, released) if name.startswith(self.outside)
        }

    def draft_layers(self, config: Mapping[str, Any]) -> tuple[Draft, ...]:
        """The draft layers that this config promises."""
        text = self.config(config)
        if self.drafts == "appended":
            first = _count(text, "num_hidden_layers", 0)
            return tuple(
                self._appended(layer) for layer in range(first, first + _count(text, "num_nextn_predict_layers", 0))
            )
        if self.drafts == "mtp_layers":
            # SGLang's class gives the modules of the layer no prefix at all.
            entry = r"re:(model\.mtp_layers|self_attn|mlp)\..*"
            roots = [f"model.mtp_layers.{depth}." for depth in range(_count(text, "num_nextn_predict_layers", 0))]
            return tuple(Draft(root, "", entry, root, f"{root}input_proj") for root in roots)
        # Qwen3-Next: no release has the key. SGLang builds the layer under the names of the model's own first layer.
        sglang, default = ("mtp.", 0) if self.drafts == "mtp" else (None, 1)
        draft = Draft("mtp.", sglang, r"re:mtp\..*", "mtp.layers.0.", "mtp.fc")
        return (draft,) if _count(text, "mtp_num_hidden_layers", default) else ()

    def _appended(self, layer: int) -> Draft:
        root = re.escape(self.root)
        names = (
            rf"model\.(layers\.{layer}|decoder)"
            if self.root == "model."
            else rf"({root}layers\.{layer}|model\.decoder)"
        )
        own = f"{self.root}layers.{layer}."
        return Draft(own, "model.decoder.", rf"re:{names}\..*", own, f"{own}eh_proj")


def _count(text: Mapping[str, Any], key: str, default: int) -> int:
    value = text.get(key, default)
    return value if isinstance(value, int) else 0


_MIXTRAL = {"moe": "block_sparse_moe", "experts": ("w1", "w3", "w2")}
_VISUAL = {"root": "model.language_model.", "nested": True, "whole": True, "outside": ("model.visual.",)}
_OF_GEMMA = ("vision_tower.", "multi_modal_projector.")
_GEMMA = {
    "root": "language_model.model.",
    "head": "language_model.lm_head",
    "nested": True,
    "whole": True,
    "outside": _OF_GEMMA,
}
_KIMI = {
    "root": "language_model.model.",
    "head": "language_model.lm_head",
    "nested": True,
    "outside": ("vision_tower.", "mm_projector."),
}

RELEASED: Mapping[str, Released] = MappingProxyType(
    {
        name: Released(name)
        for name in (
            "deepseek_v3",
            "deepseek_v32",
            "gemma3_text",
            "glm4",
            "glm4_moe",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "llama",
        )
    }
    | {name: Released(name) for name in ("mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")}
    | {
        "gemma3": Released("gemma3_text", **_GEMMA),  # type: ignore[arg-type]
        "kimi_k2": Released("deepseek_v3"),
        "kimi_k25": Released("deepseek_v3", **_KIMI),  # type: ignore[arg-type]
        "mimo": Released("qwen2", drafts="mtp_layers"),
        "minimax_m2": Released("minimax_m2", **_MIXTRAL),  # type: ignore[arg-type]
        "mixtral": Released("mixtral", **_MIXTRAL),  # type: ignore[arg-type]
        "qwen3_5": Released("qwen3_5_text", drafts="mtp", **_VISUAL),  # type: ignore[arg-type]
        "qwen3_5_moe": Released("qwen3_5_moe_text", drafts="mtp", **_VISUAL),  # type: ignore[arg-type]
        "qwen3_5_moe_text": Released("qwen3_5_moe_text", drafts="mtp"),
        "qwen3_5_text": Released("qwen3_5_text", drafts="mtp"),
        "qwen3_next": Released("qwen3_next", drafts="mtp of qwen3_next"),
        "qwen3_vl": Released("qwen3_vl_text", **_VISUAL),  # type: ignore[arg-type]
        "qwen3_vl_moe": Released("qwen3_vl_moe_text", **_VISUAL),  # type: ignore[arg-type]
    }
)


def released(config: Mapping[str, Any]) -> Released:
    """How the release of this config's `model_type` is spelled. Raises CkptkitError for one that is not known here."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in RELEASED:
        known = ", ".join(sorted(RELEASED))
        raise CkptkitError(
            f"model_type {model_type!r}: which of its tensors are Linear layers is not known",
            f"INT4 is supported for {known}",
        )
    return RELEASED[model_type]
