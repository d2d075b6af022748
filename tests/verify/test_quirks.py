"""`verify/quirks`: every row has what it needs and is about a tested release; other releases have no such quirk."""

import json
import re
import tomllib
from datetime import date
from importlib.resources import files
from pathlib import Path

import pytest

from ckptkit.verify.quirks import Quirk, quirk, quirks, releases_of

ROOT = Path(__file__).parents[2]
TABLES = {file.stem: tomllib.loads(file.read_text()) for file in (ROOT / "verify/quirks").glob("*.toml")}
ROWS = [(name, Quirk(**row)) for name, table in TABLES.items() for row in table["quirk"]]
EFFECTS = {
    *("default_ok", "unwritten_ok", "unset", "misorders", "refuses", "ignores", "reads_otherwise", "takes"),
    *("constant", "unstated", "clashes"),
}
# Where the project states the releases that it is tested with, besides: the first column of a table, a pin, a registry.
STATED = {
    "sglang": ("lab/sglang-versions.md", r"^\| (0\.\d+\.\d+(?:\.post\d+)?)[ ,]"),
    "vllm": ("lab/vllm-versions.md", r"^\| (0\.\d+\.\d+)[ ,]"),
    "transformers": ("constraints.txt", r"^transformers==(\S+)"),
    "megatron": ("constraints.txt", r"^megatron-core==(\S+)"),
}


@pytest.mark.parametrize("name", TABLES)
def test_releases_of_are_those_that_the_project_states(name):
    file, pattern = STATED[name]
    stated = set(re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE))
    tested = set(releases_of(name))
    assert stated
    assert stated == tested if file.startswith("lab/") else stated <= tested


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_release_of_an_engines_registry_is_tested(name):
    """`quant/engines` copies what a release knows of drafts."""
    content = json.loads(files("ckptkit.quant.engines").joinpath(f"{name}.json").read_text())
    release = content["release"].split()[1]
    assert any(one == release or one.startswith(f"{release}.") for one in releases_of(name))


def test_rows_have_what_they_need_and_a_tested_release():
    """Where a release moved past a row, change `versions`; where it was mended, take out the row and its use."""
    for name, row in ROWS:
        assert any(map(row.includes, releases_of(name))), f"{row.id} of {name}: {row.versions} is of no tested release"
        assert re.fullmatch(r">=\d+(\.\d+)+,<\d+(\.\d+)*", row.versions), "a range has two ends, so that it expires"
        assert row.effect in EFFECTS
        assert row.source
        assert date.fromisoformat(row.added)
        assert row.when.keys() <= {"tensors", "config", "package", "fields"}
        for pattern in (row.when.get("tensors", ""), *row.when.get("config", {}).values()):
            re.compile(pattern)
        assert [one["id"] for one in TABLES[name]["quirk"]].count(row.id) == 1


def test_every_row_is_asked_for():
    """By its effect where it is about names of tensors, else by its id."""
    code = "".join(file.read_text() for file in (ROOT / "verify").rglob("*.py"))
    by_effect = {effect for effect in EFFECTS if re.search(rf'quirks\([^()]*"{effect}"', code)}
    for _, row in ROWS:
        named = f'"{row.id}"' in code or f'_describe_quirk("{row.id.removeprefix("lora-")}"' in code.replace("'", '"')
        assert named or row.effect in by_effect, row.id


@pytest.mark.parametrize(
    ("versions", "release", "is_of"),
    [
        (">=0.5.15,<0.6", "0.5.15.post1", True),
        (">=0.5.15,<0.5.23", "0.5.9", False),
        (">=0.26,<0.27", "0.26.0+cpu", True),
        (">=0.26,<0.27", "0.27.0", False),
    ],
)
def test_range_has_a_release(versions, release, is_of):
    assert Quirk("", versions, "", "", "").includes(release) == is_of


def test_a_release_outside_a_range_has_no_such_quirk():
    """Without a release those of a tested one count."""
    assert quirk("sglang", "input-scale-unset") is not None
    assert quirk("sglang", "input-scale-unset", "0.5.16") is not None
    assert quirk("sglang", "input-scale-unset", "0.5.23") is None
    assert [one.id for one in quirks("megatron", "refuses", "0.16.1")] == ["indexer-rows"]
    assert [one.id for one in quirks("megatron", "refuses", "0.19.2")] == ["query-norm"]
    assert quirks("sglang", "default_ok", "9.9.9") == ()


@pytest.mark.parametrize(
    ("name", "effect", "tensor", "config", "expected"),
    [
        ("sglang", "default_ok", "model.layers.0.self_attn.attn.k_scale", {}, True),
        ("sglang", "default_ok", "model.layers.0.self_attn.q_proj.weight", {}, False),
        ("sglang", "unwritten_ok", "model.layers.1.mlp.experts.w13_blockscale_swizzled", {}, True),
        (
            "sglang",
            "unwritten_ok",
            "vision_tower.vision_model.post_layernorm.bias",
            {"model_type": "minimax_m3_vl"},
            True,
        ),
        ("sglang", "unwritten_ok", "vision_tower.vision_model.post_layernorm.bias", {"model_type": "llava"}, False),
        ("vllm", "default_ok", "model.layers.0.self_attn.attn._k_scale_cpu", {}, True),
        ("vllm", "default_ok", "model.layers.0.mlp.experts._expert_map", {}, True),
        ("vllm", "misorders", "model.layers.0.mlp.experts.routed_experts.w13_weight_scale", {}, True),
        ("vllm", "misorders", "model.layers.0.mlp.experts.w2_weight_scale", {}, False),
        ("transformers", "constant", "model.layers.1.mlp.gate.weight", {"model_type": "ernie4_5_moe"}, True),
        ("transformers", "constant", "model.layers.1.mlp.gate.weight", {"model_type": "qwen3_moe"}, False),
    ],
)
def test_a_row_is_about_names_and_config(name, effect, tensor, config, expected):
    assert any(one.is_about(tensor, config) for one in quirks(name, effect)) == expected
