"""Asks an engine's layers which cuts of block FP8 they refuse: `python -m support.fp8_cuts ENGINE CASES.json`.

CASES.json is a list of `{"ranks": .., "attention": .., "dims": {..}}`; it gets, for each, the modules that the engine
refuses to build. Layers are made on the meta device, by the classes that the engine's models make them of.
"""

import json
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

BLOCK, HIDDEN = [128, 128], 512
REFUSAL = "is not divisible by weight quantization block"


def refused(layers):
    """The names of the layers whose making ends in the engine's word on blocks."""
    names = []
    for name, make in layers.items():
        try:
            with torch.device("meta"):
                make()
        except ValueError as error:
            if REFUSAL not in str(error):
                raise
            names.append(name)
    return names


def layers_of(case, module, config, share):
    """The layers of a model with these sizes; `share` gives the keywords of a layer that so many ranks share."""
    dims, ranks = case["dims"], case["ranks"]
    attention = share(case["attention"])

    def column(rows):
        return lambda: module.ColumnParallelLinear(HIDDEN, rows, bias=False, quant_config=config, **attention)

    def row(columns, given):
        return lambda: module.RowParallelLinear(columns, HIDDEN, bias=False, quant_config=config, **given)

    made = {
        "gate_up_proj": lambda: module.MergedColumnParallelLinear(
            HIDDEN, [dims["ffn"]] * 2, bias=False, quant_config=config, **share(ranks)
        ),
        "down_proj": row(dims["ffn"], share(ranks)),
    }
    heads = dims["heads"]
    if "kv_rank" in dims:
        made["q_b_proj"] = column(heads * (dims["nope"] + dims["rope"]))
        made["kv_b_proj"] = column(heads * (dims["nope"] + dims["value"]))
        made["o_proj"] = row(heads * dims["value"], attention)
    else:
        made["qkv_proj"] = lambda: module.QKVParallelLinear(
            HIDDEN, dims["head_dim"], heads, dims["groups"], bias=False, quant_config=config, **attention
        )
        made["o_proj"] = row(heads * dims["head_dim"], attention)
    return made


def expert_weights(method, size):
    """Lets an engine's method for experts make the weights of a rank."""
    layer = torch.nn.Module()
    method.create_weights(
        layer,
        num_experts=2,
        hidden_size=HIDDEN,
        intermediate_size_per_partition=size,
        params_dtype=torch.bfloat16,
        weight_loader=None,
    )


def sglang(cases):
    from sglang.srt.layers import linear
    from sglang.srt.layers.quantization import fp8
    from sglang.srt.runtime_context import get_parallel

    config = fp8.Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=BLOCK)
    # Which kernel multiplies is asked of a GPU.
    linear_method = fp8.Fp8LinearMethod.__new__(fp8.Fp8LinearMethod)
    experts = fp8.Fp8MoEMethod.__new__(fp8.Fp8MoEMethod)
    for method in (linear_method, experts):
        vars(method).update(quant_config=config, block_quant=True, is_checkpoint_fp8_serialized=True)
        vars(method).update(is_fp4_expert=False, use_mxfp8=False, use_marlin=False)
    with patch.object(fp8.Fp8Config, "get_quant_method", lambda *_, **__: linear_method):
        for case in cases:
            ranks = case["ranks"]
            made = dict(layers_of(case, linear, config, lambda share: {"tp_rank": 0, "tp_size": share}))
            made["experts"] = partial(expert_weights, experts, case["dims"]["expert_ffn"] // ranks)
            with get_parallel().override(tp_size=ranks, tp_rank=0):
                yield refused(made)


def validating(base, validate):
    """A method of Linear layers that asks the engine's own function as its methods of FP8 do."""

    class Method(base):
        def create_weights(self, layer, **given):
            names = ("input_size", "output_size", "input_size_per_partition", "output_partition_sizes")
            validate(layer, *(given[name] for name in names), BLOCK)

    return Method()


def vllm(cases):
    from ckptkit.verify.witnesses.vllm import platform

    platform.choose_platform(Path(sys.argv[2]).parent)
    from vllm import distributed
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.utils.fp8_utils import validate_fp8_block_shape

    method = validating(linear.UnquantizedLinearMethod, validate_fp8_block_shape)
    # 0.33 asks for the second attribute.
    stated = {"online_quantization_config": None, "is_checkpoint_fp8_serialized": True, "activation_scheme": "dynamic"}
    stated |= {"weight_block_size": BLOCK}
    config = SimpleNamespace(get_quant_method=lambda *_, **__: method, **stated)
    experts = fp8.Fp8MoEMethod.__new__(fp8.Fp8MoEMethod)
    given = {"quant_config": config, "block_quant": True, "weight_block_size": BLOCK, "weight_scale_name": "scale"}
    vars(experts).update(given, moe=SimpleNamespace(has_bias=False))
    for case in cases:
        ranks = case["ranks"]
        with _world(ranks, distributed, linear, fp8):
            made = dict(layers_of(case, linear, config, lambda share: {}))
            made["experts"] = partial(expert_weights, experts, case["dims"]["expert_ffn"] // ranks)
            yield refused(made)


@contextmanager
def _world(ranks, *modules):
    """vLLM's modules in rank 0 of so many tensor parallel ranks."""
    answers = {"get_tensor_model_parallel_world_size": ranks, "get_tensor_model_parallel_rank": 0}
    with ExitStack() as stack:
        for module in modules:
            for name, answer in answers.items():
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, lambda answer=answer: answer))
        yield


if __name__ == "__main__":
    file = Path(sys.argv[2])
    ask = {"sglang": sglang, "vllm": vllm}[sys.argv[1]]
    file.write_text(json.dumps(list(ask(json.loads(file.read_text())))))
