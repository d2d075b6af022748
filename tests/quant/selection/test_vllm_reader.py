"""The reader `vLLM` against vLLM's own functions, over lists of `ignore` that people write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.processes import run_logged
from support.published import GLM, QWEN
from support.vllm_runs import release

from converters.hf_names import FUSED
from quant.selection.class_tree import class_tree
from quant.selection.matrices import matrices_named
from quant.selection.reading import read
from verify.witnesses.process.interpreter import python_of

QKV = [f"model.layers.0.self_attn.{one}_proj" for one in "qkv"]
LISTS = [
    *([], ["lm_head"], ["lm_head", "re:.*self_attn.*"], ["lm_head", r"re:.*\.mlp\.gate$"], QKV[:1], QKV),
    *([entry] for entry in ("model.layers.0.self_attn.qkv_proj", "re:.*qkv_proj", "re:.*qkv_proj$", "re:.*v_proj")),
    *([entry] for entry in ("re:.*v_proj$", "re:.*k_proj$", "re:.*up_proj", r"re:.*\.up_proj$", "re:.*gate_proj$")),
    *([entry] for entry in ("re:.*gate_up_proj", "re:.*gate", "re:.*mlp", "re:.*down_proj$", "down_proj", "mlp")),
    *(
        [entry]
        for entry in ("self_attn", "model.layers.0", "re:model.layers.0.*", r"re:model\.layers\.0\..*", "Linear")
    ),
    *([entry] for entry in ("re:self_attn", "RE:.*self_attn.*", "re:.*SELF_ATTN.*", "re:(?i).*O_PROJ", "re:.*_proj$")),
    *([entry] for entry in ("model.layers.0.self_attn.o_proj.weight", "re:.*o_proj.weight$", "re:.*[qkv]_proj$")),
    *(
        [entry]
        for entry in (r"re:.*o_proj(\.weight)?$", "layers.0.self_attn.o_proj", "re:^model.*o_proj$", "re:.*proj")
    ),
    *(
        [entry]
        for entry in ("re:.*(q|k|v)_proj$", "re:.*lm_head", "re:lm_head.*", "re:.*experts.*", "re:.*experts.0.*")
    ),
    *([entry] for entry in (r"re:.*\.experts\.\d+\..*", "model.layers.2.mlp.experts.0.gate_proj", "re:.*mlp.gate")),
    *([entry] for entry in (r"re:.*\.experts\.0\.down_proj$", "model.layers.2.mlp.experts", "re:.*mlp.experts$")),
    *([entry] for entry in (r"re:.*experts.1\..*", "re:.*shared_experts.*", r"re:.*shared_experts\.up_proj$")),
    *([entry] for entry in (r"re:.*mlp\.gate\..*", "model.layers.2.mlp", r"re:.*\.experts\.\d+\.(gate|up)_proj")),
]
DENSE = {key: value for key, value in QWEN.items() if key not in ("num_experts", "moe_intermediate_size")} | {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
}
MODELS = {"dense": DENSE, "Qwen3-MoE": QWEN, "GLM-4.5": GLM}


@pytest.mark.vllm
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_each_layer_is_read_as_vllm_reads_it(config: dict[str, Any], tmp_path: Path) -> None:
    if release() >= (0, 33):  # type: ignore[operator]
        pytest.skip("0.33 lets an entry that matches a fused layer's own name decide for its parts: not modelled")
    tree = class_tree(config)
    matrices = matrices_named([f"{module}.weight" for module in sorted([*tree.linears, *tree.others])], tree, config)
    layers = sorted({matrix.vllm for matrix in matrices if matrix.vllm is not None})
    fused = {name: FUSED[name] for name in ("qkv_proj", "gate_up_proj")}
    file = tmp_path / "asked.json"
    file.write_text(json.dumps({"layers": layers, "lists": LISTS, "fused": fused}))
    log = tmp_path / "log"
    assert run_logged(log, "support.vllm_ignore", file, program=python_of("vllm", {})), log.read_text()[-2000:]
    for ignore, answers in zip(LISTS, json.loads(file.read_text()), strict=True):
        wanted = dict(zip(layers, answers, strict=True))
        reading = read("vLLM", matrices, ignore, config)
        found = {matrix.vllm: answer for matrix, answer in zip(matrices, reading.answers, strict=True) if matrix.vllm}
        assert found == wanted, ignore


@pytest.mark.parametrize(("config", "answer"), [(QWEN, "packs"), (GLM, "keeps")], ids=["Qwen3-MoE", "GLM-4.5"])
def test_a_router_that_no_entry_names(config: dict[str, Any], answer: str) -> None:
    """vLLM's `qwen3_moe.py` gives its gate the config of quantization; `glm4_moe.py` makes a plain Linear of it."""
    tree = class_tree(config)
    gate = min(name for name in [*tree.linears, *tree.others] if tree.is_router(name))
    matrices = matrices_named([f"{gate}.weight"], tree, config)
    assert read("vLLM", matrices, ["lm_head"], config).answers == (answer,)
    assert read("vLLM", matrices, ["lm_head", gate], config).answers == ("keeps",)
