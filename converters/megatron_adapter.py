"""Converts LoRA adapters that Megatron-Bridge saved in torch_dist to PEFT's tensors.

Source: Megatron-Bridge 067f987df, `peft/adapter_wrapper.py` (`adapter.` in names), `peft/utils.py`
(`ParallelLinearAdapter`: `linear_in` [rank, inputs], `linear_out` [outputs, rank], scaled by alpha / dim),
`peft/canonical_lora.py` (a pair for each part of a fused weight) and `models/conversion/peft_bridge.py`, which cuts
`linear_out` of a fused weight like the weight and repeats `linear_in`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.converters.config.values import integer, number
from ckptkit.converters.lora_settings import ROOT
from ckptkit.converters.planner import Rule, dialect_of, rules_of
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import DamagedError, UnsupportedError
from ckptkit.core.plan import Plan, Step, View
from ckptkit.core.specs import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

_PAIR = re.compile(r"(.+)\.adapter\.(?:adapter_(q|k|v|gate|up)\.)?linear_(in|out)\.weight")
_EXPORT = "export the adapters as PEFT after training (Megatron-Bridge's AutoBridge.save_hf_adapter)"


def only_adapters(names: Mapping[str, TensorSpec]) -> bool:
    """Whether a Megatron checkpoint has only adapters."""
    return bool(names) and all(_PAIR.fullmatch(name) for name in names)


def as_peft(source: Checkpoint, settings: Mapping[str, Any], where: str) -> View:
    """The adapters under PEFT's names; its `config` is adapter_config.json. `settings`: `dim` and `alpha` of the run.

    Raises UnsupportedError for adapters of experts and of modules that are not Linear, and DamagedError for an
    incomplete pair or shapes that do not fit the base.
    """
    config = source.config
    rank, alpha = integer(settings, "dim"), number(settings, "alpha")
    rules = {rule.megatron: rule for rule in rules_of(config, dialect_of(config, source.specs))}
    steps: list[Step] = []
    parts: dict[tuple[str, str], dict[str, TensorSpec]] = {}
    for name, spec in source.specs.items():
        match = _PAIR.fullmatch(name)
        if match is None:
            raise UnsupportedError(f"{where}: {name} is not a factor of a LoRA pair", _EXPORT)
        parts.setdefault((match[1], match[2] or ""), {})[match[3]] = spec
    for (module, part), pair in parts.items():
        rule = rules.get(f"{module}.weight")
        if rule is None or ".experts." in module or any(len(shape) != 2 for shape in rule.hf.values()):
            raise UnsupportedError(f"{where}: an adapter of {module} is not supported", _EXPORT)
        if missing := [one for one in ("in", "out") if one not in pair]:
            raise DamagedError(f"{where}: {module} has no linear_{missing[0]}", "save the adapters again")
        steps.append(_step(rule, part, pair["in"], pair["out"], rank, where))
    modules = sorted({output.name.split(".")[-3] for step in steps for output in step.outputs})
    adapter_config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": modules}
    adapter_config |= {"bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": None}
    return View(source, Plan(tuple(steps), source.specs, where=where, config=adapter_config))


def _step(rule: Rule, part: str, a: TensorSpec, b: TensorSpec, rank: int, where: str) -> Step:
    """Converts one pair: repeats A, and splits B like the weight."""
    names = [name for name in rule.hf if not part or name.endswith(f".{part}_proj.weight")]
    rows = sum(rule.hf[name][0] for name in names)
    columns = rule.hf[names[0]][1] if names else 0
    if a.shape != (rank, columns) or b.shape != (rows, rank):
        expected = f"[{rank}, {columns}] and [{rows}, {rank}]"
        message = f"{where}: {a.name} and linear_out are {list(a.shape)} and {list(b.shape)}, not {expected}"
        raise DamagedError(message, "pass the model that the adapters were trained on: --hf BASE")
    modules = [f"{ROOT}{name.removesuffix('.weight')}" for name in names]
    outputs = [TensorSpec(f"{module}.lora_A.weight", a.shape, a.dtype) for module in modules]
    outputs += [
        TensorSpec(f"{module}.lora_B.weight", (rule.hf[name][0], rank), b.dtype)
        for module, name in zip(modules, names, strict=True)
    ]

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        cut = (tensors[1],) if part else rule.mapping.op.split(tensors[1])
        return [tensors[0].clone() for _ in modules] + [one.contiguous() for one in cut]

    return Step((a.name, b.name), tuple(outputs), run, "LoRA of Megatron")
