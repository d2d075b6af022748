"""The reader `vLLM` against vLLM's own functions, over lists of `ignore` that people write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import models
from support.published import GLM, QWEN, quantization, write
from support.vllm_answers import ask
from support.vllm_runs import release

from ckptkit.quant.formats.groups import Target
from ckptkit.quant.ignore.names import matrices_named
from ckptkit.quant.ignore.readers import VLLM
from ckptkit.quant.ignore.reading import read_all
from ckptkit.quant.ignore.tree import class_tree

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
TARGETS = [
    *(["Linear"], ["re:.*q_proj$"], ["re:.*[qkv]_proj$"], ["re:.*qkv_proj$"], ["re:.*up_proj$"], ["re:.*o_proj"]),
    *(
        ["QKVParallelLinear"],
        ["MergedColumnParallelLinear"],
        ["linear"],
        ["re:.*Linear"],
        ["re:Row.*"],
        ["RoutedExperts"],
    ),
    *(
        ["experts"],
        ["Linear", "lm_head"],
        ["lm_head"],
        ["ParallelLMHead"],
        ["re:.*"],
        ["re:.*a_proj.*"],
        ["re:.*kv_a.*"],
    ),
    *(["re:.*gate"], ["re:.*mlp.*"], QKV, QKV[:1], ["model.layers.0.self_attn.qkv_proj"], ["Module"]),
]
MODELS = ("qwen3-untied", "qwen3_moe", "glm4_moe", "deepseek_v3")


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_each_layer_is_read_as_vllm_reads_it(tmp_path: Path) -> None:
    """vLLM's classes are built from a config alone, and asked which of their layers each list packs."""
    found = release()
    reader = "vLLM 0.33" if found is not None and found >= (0, 33) else "vLLM 0.26"
    lists = [(one, ["Linear"]) for one in LISTS] + [(one, targets) for targets in TARGETS for one in ([], QKV)]
    contents = [quantization(ignore, targets) for ignore, targets in lists]
    configs = {}
    for name in MODELS:
        models.save(name, tmp_path / "plain" / name)
        configs[name] = json.loads((tmp_path / "plain" / name / "config.json").read_text())
    paths = [write(tmp_path / name, config, ["re:.*"]) for name, config in configs.items()]
    found_by_model = ask("model", [(str(path), contents) for path in paths], tmp_path)
    wrong = [
        (name, ignore, targets, layer, wanted.get(layer), ours.get(layer))
        for (name, config), answers in zip(configs.items(), found_by_model, strict=True)
        for (ignore, targets), wanted in zip(lists, answers, strict=True)
        for ours in [read_as(reader, config, ignore, targets)]
        for layer in sorted({*wanted, *ours})
        if wanted.get(layer) != ours.get(layer)
    ]
    assert wrong == []


def read_as(reader: str, config: dict[str, Any], ignore: list[str], targets: list[str]) -> dict[str, str]:
    """What ckptkit predicts of each layer that it takes this reader to ask about."""
    tree = class_tree(config)
    matrices = matrices_named([f"{module}.weight" for module in sorted([*tree.linears, *tree.others])], tree, config)
    reading = read_all([reader], matrices, ignore, config, [Target(one, "packs") for one in targets])[reader]
    return {
        matrix.vllm: answer for matrix, answer in zip(matrices, reading.answers, strict=True) if matrix.vllm is not None
    }


@pytest.mark.parametrize(("config", "answer"), [(QWEN, "packs"), (GLM, "keeps")], ids=["Qwen3-MoE", "GLM-4.5"])
def test_a_router_that_no_entry_names(config: dict[str, Any], answer: str) -> None:
    """vLLM's `qwen3_moe.py` gives its gate the config of quantization; `glm4_moe.py` makes a plain Linear of it."""
    tree = class_tree(config)
    gate = min(name for name in [*tree.linears, *tree.others] if tree.is_router(name))
    matrices = matrices_named([f"{gate}.weight"], tree, config)
    for reader in VLLM:
        assert read_all([reader], matrices, ["lm_head"], config)[reader].answers == (answer,)
        assert read_all([reader], matrices, ["lm_head", gate], config)[reader].answers == ("keeps",)
