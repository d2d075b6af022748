"""Derives a family from transformers' class for any other `model_type`, with HF names only.

`ckptkit.converters.class_in_transformers` builds the class in a separate process. That takes seconds, and requires
torch and transformers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.config.values import text_part
from ckptkit.converters.family import FusedExperts, ModelFamily, Release
from ckptkit.converters.hf_names import name_in_layer
from ckptkit.converters.rules import ParamMapping
from ckptkit.core.errors import CkptkitError, UnknownModelError
from ckptkit.core.isolation import offline, start_python
from ckptkit.core.printable import one_line
from ckptkit.formats.hf.side_files import without_quantization

_LIMIT_S = 600  # importing transformers on a busy machine, and building a large class
_LAYER = re.compile(r"(.*?)(?:layers|h|blocks|block)\.\d+\.")
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
_HINT = "update transformers, or repair config.json"


@dataclass(frozen=True)
class BuiltTensor:
    """A tensor as transformers saves it; `own`: its name in the class.

    `kind`: its module's `kind` in `ParamMapping`. `is_linear`: weight of a Linear layer, including routers.
    `module_class`: its module's class. `outside`: not part of the language model.
    """

    name: str
    own: str
    shape: tuple[int, ...]
    kind: str
    is_linear: bool
    module_class: str
    outside: bool

    @property
    def is_fused(self) -> bool:
        """Whether the class has all experts of a layer in one tensor that is not called `weight`."""
        return ".experts." in self.own and not self.own.endswith((".weight", "bias"))


@dataclass(frozen=True, eq=False)
class Built:
    """The description of transformers' class of a model.

    `head`: the output embedding's weight, or empty. `tied`: weights that repeat another one -> that weight, by saved
    names. `joins_experts`: transformers saves fused experts, which are separate here. `zero_norms`: norm weights are
    stored minus one. `sizes`: the language model's, by transformers' keys.
    """

    model_class: str
    head: str
    tensors: tuple[BuiltTensor, ...]
    tied: Mapping[str, str]
    joins_experts: bool
    zero_norms: bool
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class Known:
    """Fields of `ModelFamily` and `Release` that override those derived from a `model_type`'s class.

    `configs`: maps a config to the configs that together have all tensors; usually only the config.
    """

    family: Mapping[str, Any] = field(default_factory=dict)
    release: Mapping[str, Any] = field(default_factory=dict)
    configs: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]] = lambda config: (config,)


# Marks a Gemma 4 config of a checkpoint with unused keys and values, in layers that share those of another layer.
_STORED = "_stores_unused_keys"


def _gemma4_with_unused(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds the keys and values of layers that share another layer's, which only vLLM loads.

    Releases of E2B and E4B store them; their QAT releases and saves by transformers do not.
    """
    return {**config, _STORED: True} if text_part(config)[0].get("num_kv_shared_layers") else config


def _gemma4_configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The config, and if unused keys are stored also one where no layer shares keys."""
    plain = {key: value for key, value in config.items() if key != _STORED}
    yield plain
    if _STORED in config:
        unshared = {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}
        text = plain.get("text_config")
        yield plain | ({"text_config": {**text, **unshared}} if isinstance(text, Mapping) else unshared)


# Facts that transformers' classes do not contain.
KNOWN: Mapping[str, Known] = dict.fromkeys(
    ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    Known(
        {"with_unused": _gemma4_with_unused},
        {"kept": (".per_layer_input_gate", ".per_layer_projection", ".per_layer_model_projection")},
        lambda config: tuple(_gemma4_configs(config)),
    ),
)


def family_by_class(config: Mapping[str, Any]) -> ModelFamily | None:
    """The family of a config's model, or None if transformers has no class for it or is not installed.

    Raises CkptkitError if transformers rejects the config, and UnknownModelError if its process fails.
    """
    configs = KNOWN.get(str(config.get("model_type")), Known()).configs(config)
    several = tuple(built for one in configs if (built := built_class(one)) is not None)
    return family_from(several, str(config["model_type"])) if several else None


def built_class(config: Mapping[str, Any]) -> Built | None:
    """The description of transformers' class for a config. Returns None and raises errors like `family_by_class`."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or any(find_spec(one) is None for one in ("torch", "transformers")):
        return None
    return _built(json.dumps(without_quantization(config), sort_keys=True), model_type)


@lru_cache(maxsize=16)  # several callers need the same model
def _built(text: str, model_type: str) -> Built | None:
    with TemporaryDirectory(prefix="ckptkit-class-") as scratch:
        job, report, log = (Path(scratch) / name for name in ("config.json", "report.json", "log"))
        job.write_text(text)
        words = ["-m", "ckptkit.converters.class_in_transformers", str(os.getpid()), str(job), str(report)]
        with log.open("wb") as output:
            process = start_python(words, Path(scratch), offline(), stdout=output, stderr=output)
        try:
            process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            reason = f"no answer within {_LIMIT_S} s"
        else:
            last = one_line("\n".join(log.read_text(errors="replace").splitlines()[-1:]))
            reason = f"exit code {process.returncode}, {last or 'without output'}"
        finally:
            process.kill()
            process.wait()
        if not report.exists():
            subject = f"config.json: model_type {model_type!r} is not known to ckptkit"
            message = f"{subject}, and the process that builds transformers' class for it failed: {reason}"
            raise UnknownModelError(message, f"run `{sys.executable} -c 'import transformers'` to see whether it works")
        description = json.loads(report.read_text())
    if "refused" in description:
        message = f"transformers cannot build model_type {model_type!r} from config.json: {description['refused']}"
        raise CkptkitError(message, _HINT)
    return built_from(description) if description else None


def built_from(description: Mapping[str, Any]) -> Built:
    """Parses the result of `ckptkit.converters.class_in_transformers.describe`."""
    tensors = tuple(BuiltTensor(**one | {"shape": tuple(one["shape"])}) for one in description["tensors"])
    return Built(**{**description, "tensors": tensors})


@lru_cache(maxsize=16)
def family_from(several: tuple[Built, ...], model_type: str) -> ModelFamily:
    """The family for the first class, with additional tensors of the other classes in `several`."""
    built, names = several[0], {one.name for one in several[0].tensors}
    more = (one for other in several[1:] for one in other.tensors if one.name not in names)
    built = replace(built, tensors=(*built.tensors, *more))
    head = built.head or "lm_head.weight"
    repeated: dict[str, tuple[str, ...]] = {}
    for name, source in built.tied.items():
        repeated[source] = (*repeated.get(source, ()), name)
    within = [tensor for tensor in built.tensors if not tensor.outside]
    rules = tuple(
        ParamMapping(one.name, {one.name: one.shape}, kind=one.kind, copies=repeated.get(one.name, ()))
        for one in within
    )
    linears = [tensor for tensor in built.tensors if tensor.is_linear]
    spelled = {_module(one.own) for one in linears if not one.is_fused}
    spelled |= {_module(one.name) for one in linears if one.outside}
    towers = _prefixes([one.name for one in built.tensors if one.outside], [*(one.name for one in within), head])
    dims = _dims(built, head)
    three_axes = [one.name for one in within if len(one.shape) == 3 and "Conv" not in one.kind]
    release = Release(
        root=dims.root,
        head=head.removesuffix(".weight"),
        nested=bool(towers),
        flat=True,
        linears_outside=lambda _: spelled,
        classes={one.kind: one.module_class for one in within if one.name.endswith(".weight") and not one.is_linear},
        stacked=tuple(dict.fromkeys(name_in_layer(_module(name)) for name in three_axes if name.endswith(".weight"))),
        routers=tuple(_module(one.name) for one in linears if one.kind == "Router"),
    )
    overrides = KNOWN.get(model_type, Known())
    family = ModelFamily(
        (model_type,),
        (built.model_class,),
        lambda _: dims,
        lambda _: rules,
        passthrough=towers,
        fused=FusedExperts(is_required=any(one.is_fused and not one.is_linear for one in within)),
        release=replace(release, **overrides.release),
    )
    return replace(family, **overrides.family)


def _module(weight: str) -> str:
    return weight.removesuffix(".weight")


def _dims(built: Built, head: str) -> ModelDims:
    """The sizes for reading HF checkpoints; fields that only Megatron needs have placeholders."""
    sizes = dict.fromkeys(SIZES, 1) | {key: size for key, size in built.sizes.items() if size > 0}
    heads, groups = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    layer = next((match for one in built.tensors if not one.outside and (match := _LAYER.match(one.name))), None)
    return ModelDims(
        layers=sizes["num_hidden_layers"],
        hidden=sizes["hidden_size"],
        heads=heads,
        groups=heads if heads % groups else groups,
        head_dim=sizes["head_dim"],
        ffn=1,
        vocab=sizes["vocab_size"],
        tied=head in built.tied,
        norm_eps=1e-6,
        rope_theta=10000.0,
        rotary_fraction=1.0,
        rope_scaling=None,
        max_positions=1,
        initializer_range=0.02,
        root=layer[1] if layer else "model.",
        head=head,
        norm_offset=built.zero_norms,
    )


def _prefixes(outside: Iterable[str], inside: Iterable[str]) -> tuple[str, ...]:
    """The shortest module prefixes that cover all names outside and none inside."""
    taken = {start for name in inside for start in _starts(name)}
    return tuple(dict.fromkeys(next((one for one in _starts(name) if one not in taken), name) for name in outside))


def _starts(name: str) -> list[str]:
    return [name[: at + 1] for at, letter in enumerate(name) if letter == "."]
