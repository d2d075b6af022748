"""For CK104 and CK401: which key of config.json disagrees with the names of the tensors, and so what to do."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from converters.config.dims import ModelDims
from converters.config.values import language_part
from converters.planner import dims_of
from converters.registry import family_of
from verify.evidence.folding import MTP_LAYER, layer_of

_AGAIN = "convert or download it again; loading leaves it random"
# Heads of classes that are no language model: transformers' classifiers, TRL's and verl's value models, reward models.
_HEAD = re.compile(
    r"(?:.+\.)?(?:v_head|value_head|reward_head|rm_head|score|classifier|regression_head|qa_outputs)(?:\..+)?"
)
_OUTPUT = ("lm_head.weight", "output_layer.weight", "head.weight")
_TOWER = re.compile(
    r"(?:model\.|thinker\.)*(?:visual|vision_\w+|audio_\w+|multi_modal_projector|mm_projector|embed_vision)\."
)
_EXPERT = re.compile(r"\.experts\.(?:experts\.)?(\d+)\.")
_MTP_PARTS = re.compile(r"\.(?:eh_proj|enorm|hnorm|shared_head|final_layernorm|embed_tokens)\b")
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
_KIND_KEYS = (
    *("first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step", "moe_layer_freq", "moe_layers_enum"),
    *("mlp_layer_types", "layer_types", "hybrid_override_pattern"),
)


@dataclass(frozen=True)
class Mismatch:
    """A usable config.json and the names of all tensors, stored or listed."""

    config: Mapping[str, Any]
    names: Collection[str]

    @cached_property
    def _dims(self) -> ModelDims:
        return dims_of(self.config)

    @cached_property
    def _class(self) -> str:
        return family_of(self.config).class_of(self.config)

    @cached_property
    def _layers(self) -> frozenset[int]:
        return frozenset(layer for name in self.names if (layer := layer_of(name)) is not None)

    @cached_property
    def _mtp(self) -> frozenset[int]:
        """Numbers of layers for multi-token prediction that are stored as those after the last."""
        beyond = (name for name in self.names if (layer_of(name) or 0) >= self._dims.layers)
        return frozenset(layer_of(name) or 0 for name in beyond if _MTP_PARTS.search(name))

    @cached_property
    def _experts(self) -> int:
        """How many experts the names have at most."""
        return max((int(match[1]) + 1 for name in self.names if (match := _EXPERT.search(name))), default=0)

    def _stated(self, *keys: str) -> str:
        """Those of these keys that config.json has, with their values; the first of them where it has none."""
        text = {**self.config, **language_part(self.config)}
        found = [f"{key} is {text[key]!r:.60}" for key in keys if text.get(key) is not None]
        return f"{' and '.join(found)} in config.json" if found else f"config.json has no {keys[0]}"

    @cached_property
    def _head(self) -> str | None:
        """The name of a head that no language model has."""
        return next((name for name in self.names if _HEAD.fullmatch(name)), None)

    def _is_mtp(self, name: str) -> bool:
        return MTP_LAYER.match(name) is not None or name.startswith("mtp.") or layer_of(name) in self._mtp

    def why_unexpected(self, name: str) -> str:
        """What to do about a tensor that config.json does not promise."""
        layer, expert, dims = layer_of(name), _EXPERT.search(name), self._dims
        if _HEAD.fullmatch(name):
            return (
                f"{self._class} has no such head: name the class of this value, reward or classification model in "
                "architectures, or save its language model alone"
            )
        if _TOWER.match(name):
            return f"{self._class} has no such part: take config.json of the multimodal release, or leave these out"
        if self._is_mtp(name):
            return f"{self._stated(*_MTP_KEYS)}: set the number of multi-token prediction layers that are stored"
        if layer is not None and layer >= dims.layers:
            return f"{self._stated('num_hidden_layers')}, and layer {max(self._layers)} is stored: restore config.json"
        if expert and int(expert[1]) >= dims.experts > 0:
            return f"{self._stated(*_EXPERT_KEYS)}, and {self._experts} experts are stored: restore config.json"
        if layer is not None and ".mlp." in name and dims.experts:
            kind = "a dense layer" if layer in dims.dense else "a layer with experts"
            return f"config.json makes this layer {kind}: {self._stated(*_KIND_KEYS)}; compare with the release"
        if name.endswith("bias"):
            keys = [key for key in language_part(self.config) if "bias" in key] or ["attention_bias"]
            return f"{self._class} has no such bias by config.json: {self._stated(*keys)}; compare with the release"
        return f"{self._class} has no tensor of this name: compare it, model_type and architectures with the release"

    def why_missing(self, name: str) -> str:
        """What to do about a tensor that config.json promises and no file has."""
        layer, expert, dims = layer_of(name), _EXPERT.search(name), self._dims
        if name.endswith(_OUTPUT) and layer is None:
            if self._head is not None:
                return (
                    f"{self._head} is stored instead: name the class of this value, reward or classification model in "
                    f"architectures, which has {self._class}"
                )
            return (
                f"{self._stated('tie_word_embeddings')}: set it to true if the output layer is the embedding, else "
                "convert or download the tensor again"
            )
        numbered = MTP_LAYER.match(name) is not None or (layer is not None and layer >= dims.layers)
        if numbered and not any(map(self._is_mtp, self.names)):
            return f"{self._stated(*_MTP_KEYS)}, and no such layer is stored: set it to 0, or {_AGAIN}"
        if layer is not None and not numbered and layer > max(self._layers, default=-1):
            stored = max(self._layers, default=-1) + 1
            return (
                f"{self._stated('num_hidden_layers')}, and {stored} layers are stored: convert or download the others "
                "again, or restore config.json"
            )
        if expert and int(expert[1]) >= self._experts > 0:
            return f"{self._stated(*_EXPERT_KEYS)}, and {self._experts} experts are stored: restore config.json"
        return _AGAIN
