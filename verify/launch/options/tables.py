"""The checked options of Megatron-LM, slime, miles and the engines, with their types.

Source: Megatron-LM 0.16.1 and 0.19.0 `training/arguments.py` and the fields of `TransformerConfig` that it turns into
options; slime 624b824 and miles 31f1ca9 `utils/arguments.py`, and their patches of Megatron.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from ckptkit.converters.megatron.argument_table import ARGUMENTS
from ckptkit.verify.launch.options.names import trainer_switches

_MAX_ITEMS, _MAX_NUMBER = 1 << 15, 1 << 31
_TOO_MANY = f"more than {_MAX_ITEMS} numbers, or a number above {_MAX_NUMBER}"
_CHARACTERS = re.compile(r"[\[\]\d+*(), ]*")


def _named(kind: Any, *names: str) -> dict[str, tuple[str, Any]]:
    return {f"--{name}": (name.replace("-", "_"), kind) for name in names}


# Megatron's parallel sizes, with the same names in all stacks.
SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
MEGATRON_SIZES = SIZES | {"vpp": "virtual_pipeline_model_parallel_size"}  # of stacks with settings
# Arguments with sizes and numbers of layers, and their fields of `LaunchArguments`.
NUMBERS = {
    **{name: short for short, name in SIZES.items() if short != "cp"},
    "decoder_first_pipeline_num_layers": "first",
    "decoder_last_pipeline_num_layers": "last",
    "num_virtual_stages_per_pipeline_rank": "vpp",
    "num_layers_per_virtual_pipeline_stage": "chunk",
    "mtp_num_layers": "mtp",
    "rollout_num_gpus_per_engine": "engine",
    **dict.fromkeys(("sglang_pp_size", "vllm_pipeline_parallel_size"), "engine_pp"),
    "sglang_ep_size": "engine_ep",
}
# Arguments without a value, likewise.
FLAGS = {
    "account_for_embedding_in_pipeline_split": "embedding",
    "account_for_loss_in_pipeline_split": "loss",
    "sglang_enable_dp_attention": "dp_attention",
}
STAGES = "pipeline_model_parallel_layout"


def option_of(name: str) -> str:
    """The option that sets an argument."""
    return f"--{name.replace('_', '-')}"


# Options for the split of a model over ranks that are in no other table.
LAYOUT: Mapping[str, tuple[str, Any]] = {
    **_named(int, "num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"),
    **_named(True, "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"),
    **_named(str, "pipeline-model-parallel-layout"),
}


def numbers(text: str) -> Any:
    """The value of a number, list or range, such as `[0]*3+[1]`, without executing it. Raises ValueError otherwise."""
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("neither a number nor a list of numbers") from error


def _evaluate(node: ast.expr) -> Any:
    value: Any
    match node:
        case ast.Constant(value=int(number)):
            value = number
        case ast.List(elts=elements):
            value = [int(_evaluate(element)) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            value = _evaluate(left) + _evaluate(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _evaluate(left), _evaluate(right)
            if _size(first) * _size(second) > _MAX_ITEMS:
                raise ValueError(_TOO_MANY)
            value = first * second
        case ast.Call(func=ast.Name(id="range"), args=arguments, keywords=[]):
            value = range(*map(_evaluate, arguments))
        case ast.Call(func=ast.Name(id="list"), args=[argument], keywords=[]):
            value = list(_evaluate(argument))
        case _:
            raise ValueError(f"{ast.unparse(node)}: neither a number nor a list of numbers")
    if _size(value) > (_MAX_NUMBER if isinstance(value, int) else _MAX_ITEMS):
        raise ValueError(_TOO_MANY)
    return value


def _size(value: Any) -> int:
    return abs(value) if isinstance(value, int) else len(value)


def _frequency(text: str) -> int | list[int]:
    """An integer or a list such as `[0]*3+[1]`, as Megatron-LM `_eval_pattern` reads it. Raises ValueError."""
    if "[" not in text:
        return int(text)
    if not _CHARACTERS.fullmatch(text) or not isinstance(value := numbers(text), list):
        raise ValueError(f"{text!r} is not a list of numbers")
    return value


def sizes(text: str) -> tuple[int, ...]:
    """Integers with commas between them, with optional parentheses. Raises ValueError for any other text."""
    return tuple(int(part) for part in text.strip("()").split(","))


Kind = Callable[[str], Any] | bool  # converts an option's value, or is the value of a switch
_READERS: Mapping[Any, Kind] = {"frequency": _frequency, "sizes": sizes, int: int, float: float, str: str}


def _arguments(*, of_run: bool) -> dict[str, tuple[str, Kind]]:
    return {
        option: (row.name, sets if row.kind is bool else _READERS[row.kind])
        for row in ARGUMENTS
        if row.kind is not None and row.of_run is of_run
        for option, sets in row.options.items()
    }


MODEL: Mapping[str, tuple[str, Kind]] = _arguments(of_run=False)  # options that describe the model
# Options that change the results of training, but do not describe the model.
SWITCHES: Mapping[str, tuple[str, Kind]] = {
    **_arguments(of_run=True),
    **_named(str, "attention-backend", "moe-token-dispatcher-type", "megatron-to-hf-mode"),
    **_named(True, "fp16", "bf16", "allgather-cp", "sequence-parallel"),
}
# Options of rules about combinations and the engine's draft, which do not describe the model.
RUN: Mapping[str, tuple[str, Kind]] = {
    **_named(
        int,
        *("rollout-batch-size", "n-samples-per-prompt", "global-batch-size", "micro-batch-size", "num-rollout"),
        *("num-steps-per-rollout", "over-sampling-batch-size", "num-epoch", "start-rollout-id", "lora-rank"),
        *("multi-lora-n-adapters", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
        "prefill-num-servers",
    ),
    **_named(float, "eps-clip"),
    **_named(
        str,
        *("advantage-estimator", "loss-type", "train-backend", "lora-adapter-path", "data-source-path"),
        *("sglang-lora-paths", "target-modules", "load-debug-rollout-data", "custom-config-path"),
        *("rollout-function-path", "custom-generate-function-path", "rollout-data-postprocess-path"),
        *("custom-convert-samples-to-train-data-path", "sglang-config", "vllm-config", "rollout-external-engine-addrs"),
        *("custom-advantage-function-path", "custom-reward-post-process-path"),
        *("sglang-speculative-algorithm", "sglang-speculative-draft-model-path", "vllm-speculative-config"),
    ),
    **_named(
        True,
        *("use-opd", "use-dynamic-batch-size", "use-dynamic-global-batch-size", "disable-rewards-normalization"),
        *("finetune", "lora-train-only", "sglang-enable-lora", "vllm-enable-lora"),
    ),
    "--sglang-speculative-draft-model": ("sglang_speculative_draft_model_path", str),
    "--vllm-sc": ("vllm_speculative_config", str),
}
GPUS: Mapping[str, tuple[str, Kind]] = {
    **_named(
        int,
        *("actor-num-nodes", "actor-num-gpus-per-node", "rollout-num-gpus", "rollout-num-gpus-per-engine"),
        *("num-gpus-per-node", "sglang-dp-size", "sglang-ep-size", "sglang-pp-size", "sglang-moe-dense-tp-size"),
        *("sglang-moe-dp-size", "sglang-ep-num-redundant-experts"),
    ),
    **{option_of(name): (name, int) for name in SIZES.values()},
    **dict.fromkeys(("--sglang-data-parallel-size", "--sglang-dp"), ("sglang_dp_size", int)),
    **dict.fromkeys(("--sglang-expert-parallel-size", "--sglang-ep"), ("sglang_ep_size", int)),
    "--sglang-pipeline-parallel-size": ("sglang_pp_size", int),
    "--sglang-moe-data-parallel-size": ("sglang_moe_dp_size", int),
    **_named(str, "sglang-moe-a2a-backend"),
    **_named(int, "vllm-pipeline-parallel-size", "vllm-data-parallel-size"),
    **_named(True, "vllm-enable-expert-parallel"),
    "--vllm-pp": ("vllm_pipeline_parallel_size", int),
    "--vllm-dp": ("vllm_data_parallel_size", int),
    "--vllm-ep": ("vllm_enable_expert_parallel", True),
    **_named(True, "colocate", "sglang-enable-dp-attention", "debug-train-only", "debug-rollout-only"),
}
TABLE: Mapping[str, tuple[str, Kind]] = {**MODEL, **SWITCHES, **RUN, **GPUS, **LAYOUT}
# Options for the split of a model over ranks.
READ = frozenset(option for option, (name, _) in TABLE.items() if name in {*NUMBERS, *FLAGS, STAGES})
# Options for the checkpoints of a launch.
PATHS = (
    *("--hf-checkpoint", "--load", "--ref-load", "--ckpt-step", "--ref-ckpt-step", "--critic-load"),
    *("--opd-teacher-load", "--opd-teacher-ckpt-step", "--pretrained-checkpoint", "--save"),
)
MODULES = frozenset({"--spec", "--custom-model-provider-path"})  # modules that build a different model
# An unknown value of one of these makes a report inconclusive; an unknown value in `RUN` skips the rules that need it.
OPTIONS = frozenset({*MODEL, *SWITCHES, *GPUS, *PATHS, *MODULES, *READ})
# Options without a value: a word after one of them is no value, but may be other options.
SWITCH_NAMES = frozenset(name for name, (_, kind) in TABLE.items() if kind in (True, False)) | trainer_switches()
