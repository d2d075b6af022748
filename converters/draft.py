"""Separate EAGLE draft models: the tensors of their classes, and the sizes of their target.

Source: SGLang 0.5.16 `models/llama_eagle3.py`, `kimi_k25_eagle3.py`, `llama_eagle.py`, `qwen2_eagle.py`; vLLM 0.26
`models/llama_eagle3.py`, `qwen3_eagle3.py`, `deepseek_eagle3.py`, `llama_eagle.py`,
`transformers_utils/configs/speculators`; files saved by SpecForge, AngelSlim, ModelOpt (`hf_spec_export.py`) and
speculators.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckptkit.converters.config.bounds import check_config
from ckptkit.converters.config.values import class_of, flag, integer, language_part
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.core.printable import shortened
from ckptkit.formats.hf.side_files import is_quantized

# Supported classes: EAGLE version and decoder layer, which is empty if `transformer_layer_config` defines it.
_CLASSES: Mapping[str, tuple[int, str]] = {
    **dict.fromkeys(("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM"), (3, "llama")),
    **dict.fromkeys(("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM"), (3, "llama")),
    **dict.fromkeys(("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"), (3, "latent")),
    **dict.fromkeys(("Eagle3Speculator", "Eagle3DraftModel"), (3, "")),
    **dict.fromkeys(("LlamaForCausalLMEagle", "EagleLlamaForCausalLM"), (1, "llama")),
    "Eagle3Qwen3ForCausalLM": (3, "qwen3"),
    "Qwen2ForCausalLMEagle": (1, "qwen2"),
}
# Class names of draft models; wrappers of vision models may contain the same words.
NAMED = r"(?i)(?!.*ForConditionalGeneration$).*(eagle|nextn|mtp|medusa|speculator|draft|dflash|dspark).*"
_FIRST = "layers.0."
# Older spellings that engines also support.
_OLD = (
    *(("midlayer.", _FIRST), ("aux_norm_low.", "fc_norm.0.")),
    *(("aux_norm_mid.", "fc_norm.1."), ("aux_norm_high.", "fc_norm.2.")),
)
_COMPUTED = re.compile(r".*rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_MAX_NAME = 200  # characters of a class's name
TOKENS, USED = "d2t", "t2d"
EMBEDDING, HEAD, FUSION = "embed_tokens.weight", "lm_head.weight", "fc.weight"
_RESTORE = "restore it from the release"


def is_draft(config: Mapping[str, Any]) -> bool:
    """Whether the class in a config.json is a draft model; `draft_of` supports some of them."""
    return re.fullmatch(NAMED, class_of(config)[:_MAX_NAME]) is not None


@dataclass(frozen=True)
class Draft:
    """An EAGLE draft model from its config.json, with speculators' two levels merged."""

    config: Mapping[str, Any]
    version: int  # 3, or 1 for EAGLE 1 and 2, which have the same files, or 0 for other drafts
    decoder: str

    @property
    def label(self) -> str:
        """Its name in `inspect` and reports."""
        return f"EAGLE{self.version if self.version == 3 else ''} draft model"

    @cached_property
    def hidden(self) -> int:
        """The draft's hidden size."""
        return integer(self.config, "hidden_size")

    @cached_property
    def target_hidden(self) -> int:
        """The hidden size of the target's states."""
        return integer(self.config, "target_hidden_size", self.hidden)

    @cached_property
    def vocabulary(self) -> int:
        """The number of the target's tokens."""
        return integer(self.config, "vocab_size")

    @cached_property
    def draft_vocabulary(self) -> int:
        """The number of tokens that it can propose."""
        return integer(self.config, "draft_vocab_size", self.vocabulary)

    @cached_property
    def layer_ids(self) -> tuple[int, ...]:
        """The target layers that it reads, or empty for the engine's default. Raises CkptkitError for other values."""
        key = "eagle_aux_hidden_state_layer_ids"
        layers = self._eagle.get(key) or self.config.get(key) or ()
        if not isinstance(layers, list | tuple) or not all(type(one) is int for one in layers):
            raise CkptkitError(f"config.json: {key} is {shortened(layers)}, not a list of layers", _RESTORE)
        return tuple(layers)

    @property
    def reads_outputs(self) -> bool:
        """Whether the list of layers is in `eagle_config`, where SGLang reads it."""
        return bool(self._eagle.get("eagle_aux_hidden_state_layer_ids"))

    @cached_property
    def states(self) -> int:
        """The number of target states that `fc` combines."""
        if self.version != 3:
            return 1
        return integer(self.config, "num_aux_hidden_states", len(self.layer_ids) or 3)

    @property
    def name(self) -> str:
        """Its class."""
        return str(self.config["architectures"][0])

    @property
    def steps(self) -> int:
        """The number of tokens that it drafts at once."""
        return integer(self._eagle, "parallel_draft_step", 1)

    @cached_property
    def _eagle(self) -> Mapping[str, Any]:
        inner = self.config.get("eagle_config") or {}
        if not isinstance(inner, dict):
            raise CkptkitError(f"config.json: eagle_config is {shortened(inner)}, not an object", _RESTORE)
        return inner

    def names(self, stored: Mapping[str, Any]) -> dict[str, str]:
        """Names in the engines' classes -> stored names, without computed buffers."""
        names: dict[str, str] = {}
        for name in stored:
            current = name
            for old, new in _OLD:
                current = new + current.removeprefix(old) if current.startswith(old) else current
            if not _COMPUTED.fullmatch(current):
                names[current] = name
        return names

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors that its class may have. Raises CkptkitError for sizes missing in the config."""
        shapes: dict[str, tuple[int, ...]] = {
            EMBEDDING: (self.vocabulary, self.hidden),
            HEAD: (self.draft_vocabulary, self.hidden),
            FUSION: (self.hidden, self._fusion_width),
            "fc.bias": (self.hidden,),
        }
        for layer in range(integer(self.config, "num_hidden_layers")):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in self._layer(layer)}
        if self.version == 3:
            shapes |= {"norm.weight": (self.hidden,), TOKENS: (self.draft_vocabulary,), USED: (self.vocabulary,)}
            shapes |= {f"fc_norm.{at}.weight": (self.target_hidden,) for at in range(self.states)}
            if self.decoder != "latent":
                shapes |= {"input_norm.weight": (self._fusion_width,)}
        return shapes

    @property
    def _fusion_width(self) -> int:
        return self.states * self.target_hidden if self.version == 3 else 2 * self.hidden

    def _layer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, heads = self.hidden, integer(self.config, "num_attention_heads")
        if heads < 1:
            raise CkptkitError(f"config.json: num_attention_heads is {heads}, not positive", _RESTORE)
        width = 2 * hidden if self.version == 3 and layer == 0 else hidden
        yield from self._latent(heads, width) if self.decoder == "latent" else self._attention(heads, width)
        inner = integer(self.config, "intermediate_size")
        yield from ((f"mlp.{part}_proj.weight", (inner, hidden)) for part in ("gate", "up"))
        yield "mlp.down_proj.weight", (hidden, inner)
        norms = ("input_layernorm", "post_attention_layernorm", *(("hidden_norm",) if self.version == 3 else ()))
        yield from ((f"{norm}.weight", (hidden,)) for norm in norms)

    def _attention(self, heads: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        head = integer(self.config, "head_dim", self.hidden // heads)
        query, key = heads * head, integer(self.config, "num_key_value_heads", heads) * head
        for part, rows in (("q", query), ("k", key), ("v", key)):
            yield f"self_attn.{part}_proj.weight", (rows, width)
            yield f"self_attn.{part}_proj.bias", (rows,)
        yield from (("self_attn.o_proj.weight", (self.hidden, query)), ("self_attn.o_proj.bias", (self.hidden,)))
        if self.decoder == "qwen3":
            yield from ((f"self_attn.{part}_norm.weight", (head,)) for part in "qk")

    def _latent(self, heads: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        query, key, plain, rotary, value = (integer(self.config, name) for name in names)
        yield from (("self_attn.q_a_proj.weight", (query, width)), ("self_attn.q_a_layernorm.weight", (query,)))
        yield "self_attn.q_b_proj.weight", (heads * (plain + rotary), query)
        yield "self_attn.kv_a_proj_with_mqa.weight", (key + rotary, width)
        yield "self_attn.kv_a_layernorm.weight", (key,)
        yield "self_attn.kv_b_proj.weight", (heads * (plain + value), key)
        yield "self_attn.o_proj.weight", (self.hidden, heads * value)

    def needs(self, name: str) -> bool:
        """Whether the class requires a tensor of `shapes`."""
        config = self.config
        if name in (USED, "fc.bias") or name.endswith(".o_proj.bias"):
            return False
        if name == EMBEDDING:  # engines share the target's
            return self.target_hidden != self.hidden
        if name in (HEAD, TOKENS):
            return self.version == 3 and self.draft_vocabulary != self.vocabulary
        if name.startswith("fc_norm."):
            return flag(config, "fc_norm", False) or flag(config, "use_aux_norm", False)
        if name == "input_norm.weight":
            return flag(self._eagle, "norm_before_fc", flag(config, "norm_before_fc", False))
        if name == FUSION:
            return flag(self._eagle, "use_aux_hidden_state", True)
        if name.endswith("_proj.bias"):
            return self.decoder == "qwen2" or flag(config, "attention_bias", False)
        first = name.startswith(_FIRST)
        if name.endswith(".input_layernorm.weight"):
            return first == (self.version == 3)  # missing in EAGLE's first layer; optional in EAGLE3's later layers
        return first or not name.endswith(".hidden_norm.weight")


def sizes_of(config: Mapping[str, Any]) -> Draft:
    """The sizes of a draft model of any class. Its tensors are known only if `draft_of` supports the class."""
    name = class_of(config)
    eagle = re.search("(?i)p?eagle3?", name)
    version, decoder = _CLASSES.get(name, (0 if eagle is None else 1 if len(eagle[0]) == 5 else 3, ""))
    inner = config.get("transformer_layer_config")
    if isinstance(inner, dict):
        config = {**inner, **config}
        decoder = decoder or str(inner.get("model_type", "llama"))
    return Draft(config, version, decoder)


def draft_of(config: Mapping[str, Any]) -> Draft:
    """The draft model of a config.json for which `is_draft`. Raises UnsupportedError for unsupported drafts."""
    if class_of(config) not in _CLASSES:
        message = f"config.json: {shortened(class_of(config))} is an unsupported class of draft models"
        raise UnsupportedError(message, "docs/verify.md lists the supported classes")
    draft = sizes_of(config)
    config, decoder = draft.config, draft.decoder
    check_config(config)
    if decoder not in ("llama", "qwen2", "qwen3", "latent"):
        message = f"config.json: a draft model with decoder layers of {shortened(decoder)} is not supported"
        raise UnsupportedError(message, "verify a draft with decoder layers of Llama, Qwen2 or Qwen3")
    if is_quantized(config):
        message = "config.json: a quantized draft model is not supported"
        raise UnsupportedError(message, "verify the unquantized draft model instead")
    if draft.steps != 1:
        message = "config.json: a draft model with parallel_draft_step is not supported"
        raise UnsupportedError(message, "verify a draft that proposes one token at a time")
    return draft


@dataclass(frozen=True)
class Target:
    """Sizes of the model that a draft model drafts for."""

    hidden: int
    vocabulary: int
    layers: int
    positions: int


def target_of(config: Mapping[str, Any]) -> Target:
    """The sizes in a target's config.json. Raises CkptkitError if one is missing."""
    text = language_part(config)
    hidden, vocabulary, layers = (integer(text, key) for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
    return Target(hidden, vocabulary, layers, integer(text, "max_position_embeddings", 0))
