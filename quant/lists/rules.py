"""How readers hold one entry of a list of unquantized modules against one name, in formats other than INT4.

The lists are `modules_to_not_convert`, `ignored_layers`, `ignore`, `exclude_modules` and `exclude`. Each rule was run
beside the reader's own function in `tests/quant/lists/test_lists.py`, except where it says "read".
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from quant.patterns.entries import matcher

_NESTED = "language_model."
# Of ModelOpt's fused attention: an entry that ends so leaves the projection out of every layer in SGLang.
_LATENT_PARTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def exact(name: str, entry: str) -> bool:
    """vLLM's fp8: the whole name. Source: vLLM `quant_utils.py`, `is_layer_skipped`."""
    return name == entry


def whole_parts(name: str, entry: str) -> bool:
    """SGLang's fp8: any run of whole dotted parts, with or without `model.` before them.

    Source: SGLang `quantization/utils.py`, `_module_path_match`, and `Fp8Config.from_config`.
    """
    return f".{entry.removeprefix('model.').rstrip('.')}." in f".{name}."


def parts_only(name: str, entry: str) -> bool:
    """SGLang's ModelOpt: any run of whole dotted parts, with `language_model.` before them or not.

    Source: SGLang `ModelOptQuantConfig.apply_weight_name_mapper`.
    """
    return f".{entry.removeprefix(_NESTED).rstrip('.')}." in f".{name}."


def substring(name: str, entry: str) -> bool:
    """vLLM's ModelOpt: any part of the name, or a glob for all of it. Source: `ModelOptQuantConfigBase`."""
    return entry in name or fnmatchcase(name, entry)


def glob(name: str, entry: str) -> bool:
    """SGLang's ModelOpt: a glob for the name or for one dotted part of it.

    An entry that ends with a projection of latent attention covers it in all layers. Source: SGLang
    `modelopt_quant.py`, `is_layer_excluded`.
    """
    text = "re:" + entry.removeprefix(_NESTED).replace(".", r"\.").replace("*", ".*") + r"\Z"
    name = name.removeprefix(_NESTED)
    if _matches(text, name) or any(_matches(text, part) for part in name.split(".")):
        return True
    ending = entry.rpartition(".")[2]
    return ending in _LATENT_PARTS and ending in name.rpartition(".")[2]


def holds_expert(container: str, entry: str) -> bool:
    """SGLang's and vLLM's fp8, of a layer's routed experts: an entry for one of them leaves out all."""
    return "experts" in entry and container in entry


def sglang_experts(container: str, entry: str) -> bool:
    """SGLang's fp8, of a layer's routed experts."""
    return whole_parts(container, entry) or holds_expert(container, entry)


def vllm_modelopt_experts(container: str, entry: str) -> bool:
    """vLLM's ModelOpt, of a layer's routed experts."""
    return holds_expert(container, entry) or substring(container, entry)


def named_by_modelopt(name: str, entry: str) -> bool:
    """What an entry of ModelOpt names: a module, or all below it; a glob for either."""
    return parts_only(name, entry) or fnmatchcase(name, entry) or fnmatchcase(name, f"{entry}.*")


def regex_or_exact(name: str, entry: str) -> bool:
    """Quark: `re:` from the start of the name, or the whole name. Source: `quark/utils.py` of SGLang and vLLM."""
    return _matches(entry, name) if entry.startswith("re:") else entry == name


def quark_experts(container: str, entry: str) -> bool:
    """Quark, of a layer's routed experts: also an entry for one of them leaves out all."""
    return regex_or_exact(container, entry) or entry.startswith(f"{container}.")


def regex_from_start(name: str, entry: str) -> bool:
    """transformers 5.12: a regular expression from the start of the name, or its ending; neither ends at a dot.

    Source: transformers `quantizers_utils.py`, `should_convert_module`. Raises CkptkitError for an entry that is not a
    regular expression, where transformers raises too.
    """
    return _matches(f"re:{entry}", name) or name.endswith(entry)


def regex_to_a_dot(name: str, entry: str) -> bool:
    """transformers 5.24: as `regex_from_start`, but the expression ends at a dot or at the end. Read, not run."""
    return _matches(rf"re:(?:{entry.rstrip('.')})(?:\.|$)", name) or name.endswith(entry)


def parameter_prefix(parameter: str, entry: str) -> bool:
    """miles' NVFP4: `re:` from the start, the whole name, or the name up to a dot; of a parameter, not a module.

    Source: miles `quantizer_nvfp4.py`, `_is_ignored`.
    """
    if entry.startswith("re:"):
        return _matches(entry, parameter)
    return parameter == entry or parameter.startswith(f"{entry}.")


def verl_path(parameter: str, entry: str) -> bool:
    """verl's list for SGLang: `re:` from the start, or whole dotted parts in any case.

    Source: verl `sglang_fp8_utils.py`, `_matches_ignored_layer`.
    """
    module = parameter.removesuffix(".weight")
    if entry.startswith("re:"):
        return _matches(entry, parameter) or _matches(entry, module)
    return f".{entry.lower().strip('.')}." in f".{parameter.lower()}."


def _matches(text: str, name: str) -> bool:
    """Whether a regular expression with `re:` before it matches from the start of a name."""
    return bool(matcher(text, len(name))(name))
