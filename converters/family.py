"""What a model family is: every fact that is particular to one kind of model, as fields of `ModelFamily`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from converters.config.dims import ModelDims
from converters.config.values import flag, text_config_of
from converters.hf_names import GATE_UP_DOWN
from converters.rules import ParamMapping

KEY = "tie_word_embeddings"


@dataclass(frozen=True)
class TieFlag:
    """Readers that look at the top, and those that look in `text_config`; what they take where it is `absent`.

    `older`: readers of releases before these, which look in `text_config` too.

    Sources: transformers 5.12 `PreTrainedModel.get_expanded_tied_weights_keys` and 4.57
    `tie_embeddings_and_encoder_decoder`; SGLang 0.5.16's and vLLM 0.26's classes, vLLM's `VllmConfig.with_hf_config`.
    """

    top: tuple[str, ...] = ("transformers", "SGLang", "vLLM")
    text: tuple[str, ...] = ()
    absent: bool = False
    older: tuple[str, ...] = ()

    def read(self, config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, bool]:
        """What each reader takes, without the older ones. Raises CkptkitError where a flag is not true or false."""
        at_top, inside = flag(config, KEY, self.absent), flag(text, KEY, self.absent)
        return dict.fromkeys(self.top, at_top) | dict.fromkeys(self.text, inside)


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
    """How releases of a family spell and quantize its modules.

    `root` stands before the names of the language model's modules, `head` is the output embedding. `nested`: the sizes
    of the language model are in `text_config`; `flat`: or at the top, in configs from before transformers 4.52.
    `drafts`: its multi-token prediction layers, from the language model's config and `root`. `linears_outside`: the
    Linear layers outside the language model, by every name that an `ignore` list may know them by, from config.json;
    None where they are not known. `published_ignore`: lists of released INT4 checkpoints.

    The rest says how transformers spells the same: `model_type` of its class for the language model (empty: the
    one that its config names), `moe` and `experts`: the release's names for the block with the experts and for an
    expert's gate (where it has one), up and down projection, `classes`: transformers' classes of modules that are not
    Linear, by their kind in `ParamMapping`, `modules`: other parts of its names, with the release's.

    `routers`: how the names of Linear layers end that choose experts, where transformers' routers hold one.
    `own_tree`: no class of transformers has these modules, so that the rules alone say what they are.

    `stacked`: modules that hold all experts of a layer in one tensor, which nobody packs. `kept`: how the names of
    Linear layers end that no INT4 release quantizes. `partly_fused`: engines join queries, keys and values also where a
    layer lacks some of them.

    `older`: how the names of layers begin in older files, which engines rename while they load.

    `fp8_only`: engines' classes load it in BF16 and, with `quant_method` fp8, in FP8 blocks alone. `stated`: other keys
    of config.json that they then read.
    """

    root: str = "model."
    head: str = "lm_head"
    nested: bool = False
    flat: bool = False
    drafts: Callable[[Mapping[str, Any], str], tuple[Draft, ...]] = lambda text, root: ()
    linears_outside: Callable[[Mapping[str, Any]], Iterable[str]] | None = None
    published_ignore: tuple[frozenset[str], ...] = ()
    model_type: str = ""
    moe: str = "mlp"
    experts: tuple[str, ...] = GATE_UP_DOWN
    classes: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    routers: tuple[str, ...] = ()
    own_tree: bool = False
    stacked: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    older: str = ""

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
    """One kind of model: its exact `model_type`s, how its config is read, its rules, and how others spell it.

    `architectures`: the classes that its language models are published under, as config.json spells them; SGLang runs
    the first.

    `mappings` names Megatron tensors as megatron-core's own modules do; `dialects` holds the rules of stacks that train
    with modules of their own, by the stack's name. `carried`: how HF names begin (of a vision tower) that no Megatron
    language model holds; these tensors are kept beside the Megatron weights and come back byte for byte.
    `carried_ends`: the same for endings of names (values that every reader computes for itself, in releases that have
    them). `fused`: what its fused experts look like.
    `tie`: where its readers look for the tie flag of a multimodal config.
    `with_unused`: a config whose rules have also the tensors that only some releases store, since no reader uses them.
    `language_models`: the `model_type`s of a language model alone that may be stored under the names of the multimodal
    model, with the `model_type` of that.

    `release`: how releases are spelled and quantized; None where INT4 is not supported.
    `engines`: its class in each inference engine, by the engine's name. An engine without an entry has a plain class.
    `reference`: what to set in transformers' config of a model, so that it computes what engines and Megatron do.
    `unlike_transformers`: why transformers, as installed, computes another model from a config, for prompts of so many
    tokens; None where it does not.
    `unwitnessed`: why no released megatron-core computes its models; None where one does. Megatron's names are then
    read and written for those alone who ask for it.
    """

    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    read_dims: Callable[[Mapping[str, Any]], ModelDims]
    mappings: Rules
    dialects: Mapping[str, Rules] = field(default_factory=dict)
    carried: tuple[str, ...] = ()
    carried_ends: tuple[str, ...] = ()
    fused: FusedExperts = FusedExperts()
    tie: TieFlag = TieFlag()
    with_unused: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config
    language_models: Mapping[str, str] = field(default_factory=dict)
    release: Release | None = Release()
    reference: Mapping[str, Any] = field(default_factory=dict)
    unlike_transformers: Callable[[Mapping[str, Any], int], str | None] = lambda config, tokens: None
    unwitnessed: Unwitnessed | None = None

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
