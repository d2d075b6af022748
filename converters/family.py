"""Defines `ModelFamily`: every fact that is specific to one kind of model, as fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.config.values import text_config_of
from ckptkit.converters.hf_names import GATE_UP_DOWN
from ckptkit.converters.rules import ParamMapping

Rules = Callable[[ModelDims], tuple[ParamMapping, ...]]

_WITH_TOWERS = "ForConditionalGeneration"  # suffix of transformers' multimodal classes


@dataclass(frozen=True)
class FusedExperts:
    """The layout of tensors with all experts of a layer: `gate_up_proj`, `down_proj` and biases `*_proj_bias`.

    By default a weight is [experts, rows, columns], with gate rows above up rows. `transposed`: [experts, columns,
    rows]. `interleaved`: gate and up rows alternate. `is_required`: no engine supports separate experts.
    `renames_tensors`: a fused save also renames other tensors of the release, and is rejected.
    """

    transposed: bool = False
    interleaved: bool = False
    is_required: bool = False
    renames_tensors: bool = False


@dataclass(frozen=True)
class Draft:
    """A multi-token prediction layer. `prefix`: prefix of its names in the release.

    `sglang`: prefix in SGLang, or None if it cannot be distinguished from the model's names. `entry`: the `ignore`
    entry that excludes the layer in every engine. `layer`: prefix of its decoder layer. `joint`: its module that joins
    the embedding and the hidden state, or empty.

    `unfuses`: whether SGLang's draft class splits fused layers before it reads `ignore`, like the model's class.
    `vllm`: prefix in vLLM, or None if it is the release's. `vllm_joint`: whether vLLM also matches `joint` with
    `ignore`. `sglang_own`: prefix in SGLang if the model's layers have it too. `like`: the number of the model layer
    with the same structure, or None for the last. `own`: additional modules that engines quantize.

    Source: `sglang/srt/models/*_{nextn,mtp}.py` of SGLang 0.5.16, and vLLM's `models/*_mtp.py`; read and not run.
    """

    prefix: str
    sglang: str | None
    entry: str
    layer: str
    joint: str
    unfuses: bool = True
    vllm: str | None = None
    vllm_joint: bool = False
    sglang_own: str | None = None
    like: int | None = None
    own: tuple[str, ...] = ()


@dataclass(frozen=True)
class Release:
    """The names of a family's modules in releases and in transformers, and the modules that releases quantize."""

    root: str = "model."
    """Prefix of the language model's modules."""
    head: str = "lm_head"
    """The output embedding."""
    nested: bool = False
    """The sizes of the language model are in `text_config`."""
    flat: bool = False
    """They may also be at the top level, in configs from before transformers 4.52."""
    drafts: Callable[[Mapping[str, Any], str], tuple[Draft, ...]] = lambda text, root: ()
    """Its multi-token prediction layers, from the language model's config and `root`."""
    linears_outside: Callable[[Mapping[str, Any]], Iterable[str]] | None = None
    """The Linear layers outside the language model, from config.json, under every name that `ignore` may contain."""
    published_ignore: tuple[frozenset[str], ...] = ()
    """The `ignore` lists of released INT4 checkpoints."""
    kept: tuple[str, ...] = ()
    """Suffixes of Linear layers that no INT4 release quantizes."""
    stacked: tuple[str, ...] = ()
    """Modules with all experts of a layer in one tensor, which is never packed."""
    older: str = ""
    """Prefix of layers in older files, which engines rename while loading."""
    model_type: str = ""
    """The `model_type` of transformers' language model class, if its config does not contain it."""
    moe: str = "mlp"
    """The release's name for the block with the experts."""
    experts: tuple[str, ...] = GATE_UP_DOWN
    """Its names for an expert's gate (if any), up and down projection."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """transformers' classes of modules that are not Linear, by their kind in `ParamMapping`."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Other parts of transformers' names that the release spells differently, with the release's spelling."""
    routers: tuple[str, ...] = ()
    """Suffixes of Linear layers inside transformers' routers."""
    own_tree: bool = False
    """transformers has no class with these modules, so only the rules describe them."""

    def text(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config of the language model. Raises CkptkitError if it is missing."""
        is_flat = not self.nested or (self.flat and "text_config" not in config)
        return config if is_flat else text_config_of(config)

    def name(self, module: str) -> str:
        """The release's name of a module of transformers' language model class."""
        return self.root + respelled(module, self.modules.items()).replace(".mlp.", f".{self.moe}.")

    def own_name(self, module: str) -> str:
        """The name in transformers' complete model of a module of the release's language model."""
        name = module.removeprefix(self.root).replace(f".{self.moe}.", ".mlp.")
        name = respelled(name, ((theirs, one) for one, theirs in self.modules.items()))
        return f"{'model.language_model.' if self.nested else 'model.'}{name}"


def respelled(module: str, parts: Iterable[tuple[str, str]]) -> str:
    """A module's name with the given components replaced (old, new)."""
    for old, new in parts:
        module = f"{module}.".replace(f".{old}.", f".{new}.").removesuffix(".")
    return module


@dataclass(frozen=True)
class MegatronGap:
    """Why no released megatron-core computes a family's models.

    `reason`: the missing feature, as a clause. `names`: the stack that defines the Megatron names of the rules, or None
    if no stack does; the rules then contain HF names, which are never written.
    """

    reason: str
    names: str | None


@dataclass(frozen=True)
class ModelFamily:
    """One kind of model: its config reader, its mapping rules, and its names in other programs."""

    model_types: tuple[str, ...]
    """The exact `model_type`s."""
    architectures: tuple[str, ...]
    """The classes in config.json of its releases. SGLang runs the first. Any other class is rejected."""
    read_dims: Callable[[Mapping[str, Any]], ModelDims]
    """Reads the sizes from config.json."""
    mappings: Rules
    """The rules, with the names of megatron-core's modules."""
    dialects: Mapping[str, Rules] = field(default_factory=dict)
    """The rules of training stacks with different Megatron modules, by the stack's name."""
    passthrough: tuple[str, ...] = ()
    """Prefixes of tensors outside the language model (a vision tower), which are restored byte for byte."""
    passthrough_suffixes: tuple[str, ...] = ()
    """Suffixes of such tensors, for values that every engine computes although some releases store them."""
    fused: FusedExperts = FusedExperts()
    """The layout of fused experts."""
    with_unused: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config
    """Adds to a config the tensors that only some releases store because no engine uses them."""
    language_models: Mapping[str, str] = field(default_factory=dict)
    """A language model's `model_type` that may be stored under the multimodal model's names -> the `model_type` of the
    multimodal model."""
    release: Release | None = Release()
    """Names and quantization of releases, or None if INT4 is not supported."""
    unwitnessed: MegatronGap | None = None
    """Why no released megatron-core computes its models. Its test model is in `tests/families/unwitnessed.py`."""

    def passes_through(self, name: str) -> bool:
        """Whether a tensor of the release is passed through unchanged."""
        return name.startswith(self.passthrough) or name.endswith(self.passthrough_suffixes)

    def towers(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Name prefixes of the towers (vision, audio, projector) that engines build in addition to the language model.

        Empty for a class with only the language model. SGLang, vLLM and transformers build the vision tower for the
        class in `architectures`, even without a `vision_config`; the audio tower needs an `audio_config`.
        """
        if self.release is None or not self.release.nested or not self.class_of(config).endswith(_WITH_TOWERS):
            return ()
        return self.passthrough_prefixes(config)

    def passthrough_prefixes(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Name prefixes of passthrough tensors; those of the audio tower only if the config has an `audio_config`."""
        return tuple(one for one in self.passthrough if "audio" not in one or config.get("audio_config") is not None)

    def class_of(self, config: Mapping[str, Any]) -> str:
        """The class that engines build from a config: the first in `architectures`, or the family's first."""
        classes = config.get("architectures") or self.architectures
        return str(classes if isinstance(classes, str) else classes[0])
