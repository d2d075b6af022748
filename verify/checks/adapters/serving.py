"""CK137: engines take every part of a LoRA adapter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from converters.adapter import FLAT
from converters.config.values import integer
from converters.lora_settings import FACTOR, ROOT
from verify.check import Tally, check
from verify.checks.adapters.lora import SGLANG, VLLM, over_base, without_base
from verify.evidence.subject import Subject
from verify.issue import Issue

_MERGE = "merge it (`ckptkit convert BASE DST --merge ADAPTER`), or serve it with another engine"
# Projections that SGLang has in one layer: with the first in the adapter it looks for the second without asking.
_TOGETHER = (("q_proj", "v_proj"), ("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj"))
# Source: SkyRL#1852 for vLLM, which knows no module of these names; PEFT has one parameter of them at most.
_STACKED = (
    f"{SGLANG} takes factors with an axis of experts; {VLLM} refuses the adapter, and PEFT 0.21 drops them and merges "
    "to the base"
)
_ALL = "every part of an adapter served"


@check(
    "CK137",
    "engines take every part of the adapter",
    stage="adapter",
    needs=("source", "sound headers"),
    rationale="SGLang 0.5.16 leaves out whole tensors silently; it and vLLM 0.26 refuse others when the adapter is "
    "loaded, which in a running job is late.",
    fix="Merge the adapter (`ckptkit convert BASE DST --merge ADAPTER`) and serve that, or train q, k and v, and gate "
    "and up, together and with one rank.",
    unless=without_base,
)
def taken_whole(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Names and ranks, against what the engines' own LoRA managers do with them."""
    adapter = subject.once(over_base)
    files, kinds = adapter.files, {name.rpartition(".")[0].rpartition(".")[2] for name in adapter.base.specs}
    tally.compared(0, len(files.specs))
    rank = integer(files.config, "r", 8)
    found: dict[str, list[str]] = defaultdict(list)
    factors = {name: match for name in files.specs if (match := FACTOR.fullmatch(name))}
    modules = {match[1] for match in factors.values()}
    for name, match in factors.items():
        parent, _, leaf = match[1].rpartition(".")
        if match[3] == "magnitude_vector":
            found[f"{SGLANG} and {VLLM} refuse DoRA"].append(name)
        elif match[3] != "A":
            continue
        elif len(files.specs[name].shape) == 3:
            found[_STACKED] += [name, name.replace("lora_A", "lora_B")]
        elif leaf == "experts":
            found[f"{SGLANG} refuses experts of a layer in one pair"].append(name)
        elif ".experts." not in name and not match[2] and files.specs[name].shape[0] != rank:
            found[f"{SGLANG} refuses another rank than {rank}, which adapter_config.json has as r"].append(name)
        for own, other in _TOGETHER:
            alone = leaf == own and other in kinds and f"{parent}.{other}" not in modules
            if alone and ".experts" not in name:
                found[f"{SGLANG} refuses {own} without {other}"].append(name)
    family, config = adapter.family, adapter.base.config
    if family.towers(config) and not family.engine("vllm").adapters_of_text:
        actual = f"{VLLM} has no layer of this name in {family.class_of(config)}, and answers with the base silently"
        found[actual] += [name for name in factors if name.startswith(f"{ROOT}model.layers.")]
    whole = [name for name in files.specs if name not in factors and ".base_layer." not in name]
    found[f"{SGLANG} leaves it out silently, {VLLM} refuses the adapter"] += whole
    for actual, names in found.items():
        yield Issue(
            _ALL,
            actual,
            FLAT if actual is _STACKED else _MERGE,
            names,
            subject.path,
            severity="warning",
            together=True,
        )
