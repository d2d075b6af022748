"""The reader `vLLM` against vLLM's own functions, over lists of `ignore` that people write."""

import json
import tomllib
from pathlib import Path

import pytest
from support.published import GLM, QWEN, quantization, write
from support.vllm_answers import ask
from support.vllm_runs import release

from ckptkit.quant.formats.groups import Target
from ckptkit.quant.ignore.names import matrices_named
from ckptkit.quant.ignore.readers import VLLM
from ckptkit.quant.ignore.reading import read_all
from ckptkit.quant.ignore.tree import class_tree

ENTRIES = tomllib.loads(Path(__file__).with_name("entries.toml").read_text())
QKV = [f"model.layers.0.self_attn.{one}_proj" for one in "qkv"]
LISTS = [[], ["lm_head", "re:.*self_attn.*"], ["lm_head", r"re:.*\.mlp\.gate$"], QKV, QKV[:1]]
LISTS += [[entry] for entry in ENTRIES["int4"]]
TARGETS = [["Linear", "lm_head"], QKV, QKV[:1], *([target] for target in ENTRIES["targets"])]
MODELS = ("qwen3-untied", "qwen3_moe", "glm4_moe", "deepseek_v3")


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_each_layer_is_read_as_vllm_reads_it(releases, tmp_path):
    """vLLM's classes are built from a config alone, and asked which of their layers each list packs."""
    found = release()
    reader = "vLLM 0.33" if found is not None and found >= (0, 33) else "vLLM 0.26"
    lists = [(one, ["Linear"]) for one in LISTS] + [(one, targets) for targets in TARGETS for one in ([], QKV)]
    contents = [quantization(ignore, targets) for ignore, targets in lists]
    configs = {name: json.loads((releases(name) / "config.json").read_text()) for name in MODELS}
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


def read_as(reader, config, ignore, targets):
    """What ckptkit predicts of each layer that it takes this reader to ask about."""
    tree = class_tree(config)
    matrices = matrices_named([f"{module}.weight" for module in sorted([*tree.linears, *tree.others])], tree, config)
    reading = read_all([reader], matrices, ignore, config, [Target(one, "packs") for one in targets])[reader]
    return {
        matrix.vllm: answer for matrix, answer in zip(matrices, reading.answers, strict=True) if matrix.vllm is not None
    }


@pytest.mark.parametrize(("config", "answer"), [(QWEN, "packs"), (GLM, "keeps")], ids=["Qwen3-MoE", "GLM-4.5"])
def test_a_router_that_no_entry_names(config, answer):
    """vLLM's `qwen3_moe.py` gives its gate the config of quantization; `glm4_moe.py` makes a plain Linear of it."""
    tree = class_tree(config)
    gate = min(name for name in [*tree.linears, *tree.others] if tree.is_router(name))
    matrices = matrices_named([f"{gate}.weight"], tree, config)
    for reader in VLLM:
        assert read_all([reader], matrices, ["lm_head"], config)[reader].answers == (answer,)
        assert read_all([reader], matrices, ["lm_head", gate], config)[reader].answers == ("keeps",)
