"""What a model family is: every fact that is particular to one kind of model, as fields of `ModelFamily`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.config.values import text_config_of
from ckptkit.converters.hf_names import GATE_UP_DOWN
from ckptkit.converters.rules import ParamMapping

Rules = Callable[[ModelDims], tuple[ParamMapping, ...]]

_WITH_TOWERS = "ForConditionalGeneration"  # how the names of transformers' multimodal classes end


@dataclass(frozen=True)
class FusedExperts:
    """How a family keeps all experts of a layer in one tensor.

    `gate_up_proj` and `down_proj`, and their biases `*_proj_bias`.

    By default a weight is [experts, rows, columns], the rows of gate above those of up. `transposed`: [experts,
    columns, rows]; `interleaved`: gate and up take turns, row by row. `always`: no reader knows these experts one by
    one. `renamed`: a fused save has other names than the release beside them too, and is refused.
    """

    transposed: bool = False
    interleaved: bool = False
    always: bool = False
    renamed: bool = False


@dataclass(frozen=True)
class Draft:
    """A multi-token prediction layer. `prefix`: how its names begin in the release.

    `sglang`: how they begin in SGLang; None where that cannot be told from the model's own names. `entry`: the entry of
    `ignore` that leaves the layer out for every reader. `layer`: how the names of its decoder layer begin. `joint`: its
    module that joins the embedding and the hidden state, or nothing.

    `unfuses`: whether SGLang's draft class takes fused layers apart as the model's own class does, before it looks at
    `ignore`. `vllm`: how the names begin in vLLM; None: as in the release. `vllm_joint`: whether vLLM asks about
    `joint` too. `sglang_own`: how they begin in SGLang where these are names of the model's own layers too. `like`:
    the number of the model's layer that it is like; None: the last. `own`: modules of its own that engines quantize.

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
    """How releases of a family spell and quantize its modules, and how transformers spells them."""

    root: str = "model."
    """How the names of the language model's modules begin."""
    head: str = "lm_head"
    """The output embedding."""
    nested: bool = False
    """The sizes of the language model are in `text_config`."""
    flat: bool = False
    """Or at the top, in configs from before transformers 4.52."""
    drafts: Callable[[Mapping[str, Any], str], tuple[Draft, ...]] = lambda text, root: ()
    """Its multi-token prediction layers, from the language model's config and `root`."""
    linears_outside: Callable[[Mapping[str, Any]], Iterable[str]] | None = None
    """From config.json, the Linear layers outside the language model, by every name that an `ignore` list may know."""
    published_ignore: tuple[frozenset[str], ...] = ()
    """The `ignore` lists of released INT4 checkpoints."""
    kept: tuple[str, ...] = ()
    """How the names of Linear layers end that no INT4 release quantizes."""
    stacked: tuple[str, ...] = ()
    """Modules that hold all experts of a layer in one tensor, which is never packed."""
    older: str = ""
    """How the names of layers begin in older files, which engines rename while they load."""
    model_type: str = ""
    """Of transformers' class for the language model, where its config does not name it."""
    moe: str = "mlp"
    """The release's name for the block with the experts."""
    experts: tuple[str, ...] = GATE_UP_DOWN
    """Its names for an expert's gate (where it has one), up and down projection."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """transformers' classes of modules that are not Linear, by their kind in `ParamMapping`."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Other parts of transformers' names, with the release's."""
    routers: tuple[str, ...] = ()
    """How the names of Linear layers end that choose experts, where transformers' routers hold one."""
    own_tree: bool = False
    """transformers has no class with these modules, so that only the rules tell what they are."""

    def text(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config of the language model. Raises CkptkitError when it is not where it should be."""
        is_flat = not self.nested or (self.flat and "text_config" not in config)
        return config if is_flat else text_config_of(config)

    def name(self, module: str) -> str:
        """The name in the release of a module of transformers' class for the language model."""
        return self.root + respelled(module, self.modules.items()).replace(".mlp.", f".{self.moe}.")

    def own_name(self, module: str) -> str:
        """The name in transformers' whole model of a module of the release's language model."""
        own = module.removeprefix(self.root).replace(f".{self.moe}.", ".mlp.")
        own = respelled(own, ((theirs, one) for one, theirs in self.modules.items()))
        return f"{'model.language_model.' if self.nested else 'model.'}{own}"


def respelled(module: str, parts: Iterable[tuple[str, str]]) -> str:
    """A module's name with whole parts of it spelled otherwise."""
    for old, new in parts:
        module = f"{module}.".replace(f".{old}.", f".{new}.").removesuffix(".")
    return module


@dataclass(frozen=True)
class Unwitnessed:
    """Why no released megatron-core computes a family's models.

    `reason`: what it lacks, as a clause. `names`: whose Megatron names the rules have; None: nobody's, and then the
    rules have HF's in their place, which are never written.
    """

    reason: str
    names: str | None


@dataclass(frozen=True)
class ModelFamily:
    """One kind of model: how its config is read, its rules, and how others spell it."""

    model_types: tuple[str, ...]
    """The exact `model_type`s."""
    architectures: tuple[str, ...]
    """The classes that config.json of its releases names; SGLang runs the first. Another one is refused."""
    read_dims: Callable[[Mapping[str, Any]], ModelDims]
    """Reads the sizes from config.json."""
    mappings: Rules
    """The rules, with Megatron's names as megatron-core's own modules have them."""
    dialects: Mapping[str, Rules] = field(default_factory=dict)
    """The rules of stacks that train with modules of their own, by the stack's name."""
    carried: tuple[str, ...] = ()
    """How the names begin of tensors beside the language model (a vision tower), which come back byte for byte."""
    carried_ends: tuple[str, ...] = ()
    """How such names end, of values that every reader computes for itself and some releases store."""
    fused: FusedExperts = FusedExperts()
    """How all experts of a layer are stored in one tensor."""
    with_unused: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config
    """A config whose rules also have the tensors that only some releases store, since no reader uses them."""
    language_models: Mapping[str, str] = field(default_factory=dict)
    """A `model_type` of the language model that may be stored under the multimodal model's names, with that model's."""
    release: Release | None = Release()
    """How releases are spelled and quantized; None where INT4 is not supported."""
    unwitnessed: Unwitnessed | None = None
    """Why no released megatron-core computes its models, and whose names the rules have; its test model is one of
    `tests/families/unwitnessed.py`."""

    def carries(self, name: str) -> bool:
        """Whether a tensor of the release is only carried."""
        return name.startswith(self.carried) or name.endswith(self.carried_ends)

    def towers(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """How the names begin of what readers build beside the language model: a vision tower and its projector.

        Nothing for a class of the language model alone. SGLang, vLLM and transformers build them for the class that
        `architectures` names, also where the config has no `vision_config`; what hears, where it has an `audio_config`.
        """
        if self.release is None or not self.release.nested or not self.class_of(config).endswith(_WITH_TOWERS):
            return ()
        return self.beside(config)

    def beside(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """How the names begin of what is only carried along: of what hears only where the config has an audio tower."""
        return tuple(one for one in self.carried if "audio" not in one or config.get("audio_config") is not None)

    def class_of(self, config: Mapping[str, Any]) -> str:
        """The class that readers build from a config: the first that it names, or that the family has."""
        stated = config.get("architectures") or self.architectures
        return str(stated if isinstance(stated, str) else stated[0])
