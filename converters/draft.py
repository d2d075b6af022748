"""EAGLE draft models, which are models of their own: the tensors of their classes, and the target that they draft for.

Source: SGLang 0.5.16 `models/llama_eagle3.py`, `kimi_k25_eagle3.py`, `llama_eagle.py`, `qwen2_eagle.py`; vLLM 0.26
`models/llama_eagle3.py`, `qwen3_eagle3.py`, `deepseek_eagle3.py`, `llama_eagle.py`,
`transformers_utils/configs/speculators`; as SpecForge, AngelSlim, ModelOpt (`hf_spec_export.py`) and speculators save
them.
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

# The classes of drafts that are read: which EAGLE, and the decoder layer, empty if `transformer_layer_config` has it.
_CLASSES: Mapping[str, tuple[int, str]] = {
    **dict.fromkeys(("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM"), (3, "llama")),
    **dict.fromkeys(("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM"), (3, "llama")),
    **dict.fromkeys(("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"), (3, "latent")),
    **dict.fromkeys(("Eagle3Speculator", "Eagle3DraftModel"), (3, "")),
    **dict.fromkeys(("LlamaForCausalLMEagle", "EagleLlamaForCausalLM"), (1, "llama")),
    "Eagle3Qwen3ForCausalLM": (3, "qwen3"),
    "Qwen2ForCausalLMEagle": (1, "qwen2"),
}
# What the classes of other draft models are called; wrappers of vision models may have the same words.
NAMED = r"(?i)(?!.*ForConditionalGeneration$).*(eagle|nextn|mtp|medusa|speculator|draft|dflash|dspark).*"
_FIRST = "layers.0."
# Older spellings, which engines read too.
_OLD = (
    *(("midlayer.", _FIRST), ("aux_norm_low.", "fc_norm.0.")),
    *(("aux_norm_mid.", "fc_norm.1."), ("aux_norm_high.", "fc_norm.2.")),
)
_COMPUTED = re.compile(r".*rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_MAX_NAME = 200  # characters of a class's name
TOKENS, USED = "d2t", "t2d"
EMBEDDING, HEAD, FUSION = "embed_tokens.weight", "lm_head.weight", "fc.weight"


def is_draft(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a draft model, by the name of its class; `draft_of` reads some of them."""
    return re.fullmatch(NAMED, class_of(config)[:_MAX_NAME]) is not None


@dataclass(frozen=True)
class Draft:
    """An EAGLE draft model as its config.json has it; of speculators' two levels as one."""

    config: Mapping[str, Any]
    version: int  # 3, or 1 for the first two, whose files are alike; 0 for what is no EAGLE
    decoder: str

    @property
    def label(self) -> str:
        """What `inspect` and reports call it."""
        return f"EAGLE{self.version if self.version == 3 else ''} draft model"

    @cached_property
    def hidden(self) -> int:
        """Its own width."""
        return integer(self.config, "hidden_size")

    @cached_property
    def target_hidden(self) -> int:
        """The width of the target's states that it reads."""
        return integer(self.config, "target_hidden_size", self.hidden)

    @cached_property
    def vocabulary(self) -> int:
        """The target's tokens."""
        return integer(self.config, "vocab_size")

    @cached_property
    def draft_vocabulary(self) -> int:
        """The tokens that it can propose."""
        return integer(self.config, "draft_vocab_size", self.vocabulary)

    @cached_property
    def layer_ids(self) -> tuple[int, ...]:
        """The target's layers whose states it reads; empty: the engine's default. Raises CkptkitError for others."""
        key = "eagle_aux_hidden_state_layer_ids"
        given = self._eagle.get(key) or self.config.get(key) or ()
        if not isinstance(given, list | tuple) or not all(type(one) is int for one in given):
            raise CkptkitError(f"config.json: {key} is {shortened(given)}, not a list of layers", "restore it")
        return tuple(given)

    @property
    def reads_outputs(self) -> bool:
        """Whether SGLang finds the list of layers, where it looks for it."""
        return bool(self._eagle.get("eagle_aux_hidden_state_layer_ids"))

    @cached_property
    def states(self) -> int:
        """How many states of the target `fc` takes together."""
        if self.version != 3:
            return 1
        given = self.config.get("num_aux_hidden_states")
        return len(self.layer_ids) or 3 if given is None else integer(self.config, "num_aux_hidden_states")

    @property
    def name(self) -> str:
        """Its class."""
        return str(self.config["architectures"][0])

    @property
    def steps(self) -> int:
        """How many tokens it drafts at once."""
        return integer(self._eagle, "parallel_draft_step", 1)

    @cached_property
    def _eagle(self) -> Mapping[str, Any]:
        inner = self.config.get("eagle_config") or {}
        if not isinstance(inner, dict):
            raise CkptkitError(f"config.json: eagle_config is {shortened(inner)}, not an object", "restore it")
        return inner

    def names(self, stored: Mapping[str, Any]) -> dict[str, str]:
        """Stored names by those of the engines' classes, without buffers that are computed."""
        found: dict[str, str] = {}
        for name in stored:
            own = name
            for old, new in _OLD:
                own = new + own.removeprefix(old) if own.startswith(old) else own
            if not _COMPUTED.fullmatch(own):
                found[own] = name
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that its class may have, and its shape. Raises CkptkitError for sizes that the config lacks."""
        found: dict[str, tuple[int, ...]] = {
            EMBEDDING: (self.vocabulary, self.hidden),
            HEAD: (self.draft_vocabulary, self.hidden),
        }
        found |= {FUSION: (self.hidden, self._fusion_width), "fc.bias": (self.hidden,)}
        for layer in range(integer(self.config, "num_hidden_layers")):
            found |= {f"layers.{layer}.{name}": shape for name, shape in self._layer(layer)}
        if self.version == 3:
            found |= {"norm.weight": (self.hidden,), TOKENS: (self.draft_vocabulary,), USED: (self.vocabulary,)}
            found |= {f"fc_norm.{at}.weight": (self.target_hidden,) for at in range(self.states)}
            if self.decoder != "latent":
                found |= {"input_norm.weight": (self._fusion_width,)}
        return found

    @property
    def _fusion_width(self) -> int:
        return self.states * self.target_hidden if self.version == 3 else 2 * self.hidden

    def _layer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, heads = self.hidden, integer(self.config, "num_attention_heads")
        if heads < 1:
            raise CkptkitError(f"config.json: num_attention_heads is {heads}", "restore it from the release")
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
        """Whether the class cannot do without a tensor of `shapes`: nothing else gives it a value."""
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
            return first == (self.version == 3)  # EAGLE's first layer has none, EAGLE3 takes one of two after it
        return first or not name.endswith(".hidden_norm.weight")


def sizes_of(config: Mapping[str, Any]) -> Draft:
    """The sizes of a draft model of any class. Its tensors are known where `draft_of` reads the class."""
    name = class_of(config)
    eagle = re.search("(?i)p?eagle3?", name)
    version, decoder = _CLASSES.get(name, (0 if eagle is None else 1 if len(eagle[0]) == 5 else 3, ""))
    inner = config.get("transformer_layer_config")
    if isinstance(inner, dict):
        config = {**inner, **config}
        decoder = decoder or str(inner.get("model_type", "llama"))
    return Draft(config, version, decoder)


def draft_of(config: Mapping[str, Any]) -> Draft:
    """The draft model of a config.json for which `is_draft`. Raises UnsupportedError for what is not read of them."""
    if class_of(config) not in _CLASSES:
        message = f"config.json: {shortened(class_of(config))} is a class of draft models that is not read"
        raise UnsupportedError(message, "docs/verify.md says which are")
    draft = sizes_of(config)
    config, decoder = draft.config, draft.decoder
    check_config(config)
    if decoder not in ("llama", "qwen2", "qwen3", "latent"):
        message = f"config.json: a draft model with decoder layers of {shortened(decoder)} is not read"
        raise UnsupportedError(message, "Llama's, Qwen2's and Qwen3's are")
    if is_quantized(config):
        raise UnsupportedError("config.json: a quantized draft model is not read", "verify the one it was made from")
    if draft.steps != 1:
        message = "config.json: a draft model with parallel_draft_step is not read"
        raise UnsupportedError(message, "those that draft one token after another are")
    return draft


@dataclass(frozen=True)
class Target:
    """What a draft model must know of the model that it drafts for."""

    hidden: int
    vocabulary: int
    layers: int
    positions: int


def target_of(config: Mapping[str, Any]) -> Target:
    """The sizes in a target's config.json. Raises CkptkitError where it lacks one."""
    text = language_part(config)
    hidden, vocabulary, layers = (integer(text, key) for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
    return Target(hidden, vocabulary, layers, integer(text, "max_position_embeddings", 0))
