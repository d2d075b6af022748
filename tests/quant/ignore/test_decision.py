"""Which tensors are quantized, by classes, a reference or a tensor parallel size; which lists are refused, and why."""

import re
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from families import HF_CASES
from families.table import config_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import models
from support.installed import release
from support.messages import refusal, text_with
from support.published import GLM, KIMI, KIMI_LIST, QWEN, kimi_names

from ckptkit.converters.planner import dims_of, expected_hf
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.quant.formats.scheme import QuantScheme, quantization_config
from ckptkit.quant.ignore.select import default_ignore, packed_modules, select_int4_weights
from ckptkit.quant.ignore.tiles import unloadable, unrunnable
from ckptkit.quant.ignore.tree import class_tree

NOT_INT4 = ("bailing_moe", "deepseek_v4", "glm5_next", "gpt_oss", "kimi_k3", "qwen3_omni", "step3p")
INT4_CASES = [name for name in HF_CASES if not name.startswith(NOT_INT4)]
ATTENTION = r"self_attn\.[qkvo]_proj"
MLP = r"mlp\.(gate|up|down)_proj"
EXPERTS = r"mlp\.experts\.\d+\.(gate|up|down)_proj"
SHARED = r"mlp\.shared_experts?\.(gate|up|down)_proj"
SPARSE = r"block_sparse_moe\.experts\.\d+\.w[123]"
# What is INT4 inside a decoder layer, by model type, written from the releases. Any other type is plainly dense, unless
# its test model says otherwise (`Case.packed`).
DENSE = (ATTENTION, MLP)
PACKED = {
    "deepseek_v3": (MLP, EXPERTS),
    "deepseek_v32": (MLP, EXPERTS),
    "exaone_moe": (ATTENTION, MLP, EXPERTS, SHARED),
    "glm4": (ATTENTION, r"mlp\.(gate_up|down)_proj"),
    "phi3": (r"self_attn\.(qkv|o)_proj", r"mlp\.(gate_up|down)_proj"),
    "glm4_moe": (ATTENTION, MLP, EXPERTS, SHARED),
    "glm4_moe_lite": (MLP, EXPERTS),
    "glm_moe_dsa": (MLP, EXPERTS),
    "hy_v3": (ATTENTION, MLP, EXPERTS, r"mlp\.shared_mlp\.(gate|up|down)_proj"),
    "kimi_k2": (MLP, EXPERTS),
    "kimi_k25": (MLP, EXPERTS),
    "minimax_m2": (ATTENTION, SPARSE),
    "ernie4_5_moe": (ATTENTION, MLP, EXPERTS, SHARED),
    "olmoe": (ATTENTION, EXPERTS),
    "mixtral": (ATTENTION, SPARSE),
    "nemotron_h": (
        r"mixer\.(in|out|[qkvo]|up|down|fc[12]_latent)_proj",
        r"mixer\.(experts\.\d+|shared_experts)\.(up|down)_proj",
    ),
    "qwen2_moe": (ATTENTION, MLP, EXPERTS, SHARED),
    "qwen3_5_moe": (ATTENTION, EXPERTS, SHARED),
    "qwen3_5_moe_text": (ATTENTION, EXPERTS, SHARED),
    "qwen3_moe": (ATTENTION, MLP, EXPERTS),
    "qwen3_next": (ATTENTION, EXPERTS, SHARED),
    "qwen3_vl_moe": (ATTENTION, EXPERTS),
}
NESTED = "language_model.model."
ROOT = {"gemma3": NESTED, "kimi_k25": NESTED, "mistral3": NESTED, "nemotron_h": "backbone."} | dict.fromkeys(
    ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), "model.language_model."
)


def scheme(*ignore, group_size=32):
    return QuantScheme(group_size, "qmax7", ignore)


def release_specs(config):
    return {name: TensorSpec(name, tuple(shape), "bfloat16") for name, shape in expected_hf(config).items()}


@pytest.mark.parametrize("case", INT4_CASES)
def test_what_is_packed_in_every_model(case):
    """On the names and shapes that the converter expects of the release, which know nothing of classes."""
    config = config_of(HF_CASES[case])
    specs = release_specs(config)
    packed = select_int4_weights(specs, config, QuantScheme(None, "qmax7", default_ignore(config)))
    model_type = config["model_type"]
    patterns = HF_CASES[case].packed or PACKED.get(model_type, DENSE)
    layers = dims_of(config).layers
    wanted = re.compile(rf"{re.escape(ROOT.get(model_type, 'model.'))}layers\.(\d+)\.({'|'.join(patterns)})\.weight")
    expected = {name for name in specs if (match := wanted.fullmatch(name)) and int(match[1]) < layers}
    assert expected
    assert packed == expected


def specs_of(config, **shapes):
    """Every matrix, [128, 128] unless `shapes` has the ending of its name."""
    tree = class_tree(config)
    modules = [*tree.others, *sorted(tree.linears)]
    return {
        f"{name}.weight": TensorSpec(f"{name}.weight", shapes.get(name.split(".")[-1], (128, 128)), "bfloat16")
        for name in modules
    }


def test_a_reference_says_what_is_packed():
    """Kimi-K2-Thinking has its routed experts alone in INT4."""
    like = set(kimi_names())
    ignore = default_ignore(KIMI, like)
    packed = select_int4_weights(specs_of(KIMI), KIMI, scheme(*ignore), like=like)
    assert packed == {
        name
        for name in specs_of(KIMI)
        if re.fullmatch(r"model\.layers\.[123]\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight", name)
    }
    # The release's own list does as well, with what slime needs.
    assert select_int4_weights(specs_of(KIMI), KIMI, scheme(*KIMI_LIST, *default_ignore(KIMI)), like=like) == packed


def test_a_list_or_a_model_that_contradicts_the_reference():
    with pytest.raises(CkptkitError, match=r"slime .*model\.layers\.0\.mlp\."):
        select_int4_weights(specs_of(KIMI), KIMI, scheme(*default_ignore(KIMI)), like=set(kimi_names()))
    absent = {name for name in kimi_names() if "layers.1.mlp.experts.3.down" not in name}
    with pytest.raises(CkptkitError, match=r"--like.*model\.layers\.1\.mlp\.experts\.3\.down_proj\.weight"):
        select_int4_weights(specs_of(KIMI), KIMI, scheme(), like=absent)


@pytest.mark.parametrize(
    ("module", "reason"),
    [("model.layers.2.mlp.gate", "DeepseekV3TopkRouter"), ("model.layers.2.self_attn.kv_b_proj", "SGLang")],
)
def test_a_reference_that_packs_what_can_not_be(module, reason):
    with pytest.raises(CkptkitError, match=rf"--like .*{module}\.weight_packed.* {reason}"):
        select_int4_weights(specs_of(KIMI), KIMI, scheme(), like={*kimi_names(), f"{module}.weight_packed"})


def expert_specs(hidden, inner):
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return [
        TensorSpec(f"model.layers.0.mlp.experts.0.{name}.weight", shape, "bfloat16") for name, shape in shapes.items()
    ]


SIZES = st.integers(1, 40).map(lambda tiles: 32 * tiles)
RANKS, GROUPS = st.sampled_from([1, 2, 4, 8]), st.sampled_from([32, 64, 128, None])


@pytest.fixture(scope="module")
def marlin():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.layers.quantization import marlin_utils
    return marlin_utils


@pytest.mark.sglang
@settings(max_examples=100, deadline=None, derandomize=True)
@given(SIZES, SIZES, GROUPS, RANKS)
@example(512, 1024, 128, 8)
@example(512, 1024, 64, 8)
@example(96, 1024, 32, 1)
def test_a_layer_fits_as_sglang_says(marlin, rows, columns, group_size, tp):
    fits, _ = marlin.check_marlin_supports_shape(rows, columns // tp, columns, group_size or -1)
    assert passes(QWEN, plain_layer(rows, columns), group_size, tp) == (fits and columns % tp == 0)


@pytest.mark.sglang
@settings(max_examples=100, deadline=None, derandomize=True)
@given(SIZES, SIZES, GROUPS.filter(bool), RANKS)
@example(2048, 768, 128, 2)
@example(2048, 768, 128, 4)
@example(192, 512, 64, 1)
def test_experts_fit_as_sglang_says(marlin, hidden, inner, group_size, tp):
    runner = SimpleNamespace(apply_router_weight_on_input=False, is_gated=True, activation="silu")
    layer = SimpleNamespace(hidden_size=hidden, intermediate_size_per_partition=inner // tp, moe_runner_config=runner)
    specs = expert_specs(hidden, inner)
    supported = inner % tp == 0 and marlin.check_moe_marlin_supports_layer(layer, group_size)
    assert passes(QWEN, specs, group_size, tp) == supported


def plain_layer(rows, columns):
    return [TensorSpec("model.layers.0.self_attn.o_proj.weight", (rows, columns), "bfloat16")]


def passes(config, specs, group_size, tp, ep=1):
    return unloadable(specs, class_tree(config), config, group_size, tp, ep) is None


@pytest.mark.parametrize(("tp", "ep", "fits"), [(8, 1, False), (8, 2, True), (8, 8, True), (2, 8, True)])
def test_expert_parallel_ranks_do_not_cut_experts(tp, ep, fits):
    """Qwen3-235B-A22B has experts of 1536 features: 192 on each of eight ranks, which no group of 128 divides."""
    assert passes(QWEN, expert_specs(4096, 1536), 128, tp, ep) == fits


@pytest.mark.parametrize(("tp", "fits"), [(1, True), (2, True), (4, True), (8, True), (16, False)])
def test_shards_of_a_fused_layer_are_looked_at_together(tp, fits):
    """q has 512 rows; k and v have 2 heads of 32 rows, repeated on four ranks or more: 96 rows on sixteen ranks."""
    shapes = {"q_proj": (512, 128), "k_proj": (64, 128), "v_proj": (64, 128)}
    specs = [TensorSpec(f"model.layers.0.self_attn.{name}.weight", shape, "bfloat16") for name, shape in shapes.items()]
    assert passes(QWEN, specs, 32, tp) == fits


def test_advice_for_a_tensor_parallel_size():
    """Qwen3-30B-A3B has experts of 768 features: 384 on two ranks, 192 on four."""
    specs = specs_of(QWEN, gate_proj=(768, 2048), up_proj=(768, 2048), down_proj=(2048, 768))
    ignore = (*default_ignore(QWEN), "re:.*self_attn.*")
    select_int4_weights(specs, QWEN, scheme(*ignore, group_size=128), tp=2)
    with pytest.raises(CkptkitError, match=r"4:\n .*experts.*768.*4.*192") as caught:
        select_int4_weights(specs, QWEN, scheme(*ignore, group_size=128), tp=4)
    assert caught.value.hint == text_with("2 --scheme"), "without experts nothing would be packed"
    select_int4_weights(specs, QWEN, scheme(*ignore, group_size=32), tp=4)


def test_columns_that_fill_no_word():
    """A scale for each row asks for no groups, but eight codes share a word."""
    specs = specs_of(GLM, o_proj=(128, 100))
    with pytest.raises(CkptkitError, match=r"8.*100.*model\.layers\.\{0\.\.3\}\.self_attn\.o_proj"):
        select_int4_weights(specs, GLM, scheme(*default_ignore(GLM), group_size=None))


@cache
def kernel_tiles(file):
    """Rows and columns of which a layer must be made, by the thread configurations in SGLang's own source.

    Its columns are `prob_k`, and its rows `prob_n`.
    """
    import sglang

    moved = "kernels/jit" if release("sglang") >= (0, 5, 23) else "jit_kernel"
    source = (Path(sglang.__path__[0]) / moved / "csrc" / "gemm" / file).read_text()
    configs = re.findall(r"_batch_thread_configs\[\] = \{(.*?)\};", source, re.DOTALL)
    return {
        (int(rows), int(columns))
        for config in configs
        for columns, rows in re.findall(r"\{(\d+), (\d+), \d+\}", config)
    }


def fits_some(tiles, rows, columns, group_size):
    tiled = any(rows % down == 0 and columns % across == 0 for down, across in tiles)
    return tiled and columns % (group_size or 1) == 0


@pytest.mark.sglang
@settings(max_examples=100, deadline=None, derandomize=True)
@given(SIZES, SIZES, st.sampled_from([32, 64, None]))
@example(960, 576, 32)  # SmolLM2-135M's fused q, k and v
@example(192, 512, 64)
def test_a_layer_has_a_kernel_as_sglangs_source_has_it(rows, columns, group_size):
    tiles, experts_tiles = kernel_tiles("marlin/gptq_marlin.cuh"), kernel_tiles("marlin_moe/moe_wna16_marlin.cuh")
    assert (len(tiles), len(experts_tiles)) == (4, 3)
    found = unrunnable(plain_layer(rows, columns), class_tree(QWEN), QWEN, group_size)
    assert (found is None) == fits_some(tiles, rows, columns, group_size)
    if group_size:
        found = unrunnable(expert_specs(columns, rows), class_tree(QWEN), QWEN, group_size)
        sides = ((2 * rows, columns), (columns, rows))
        assert (found is None) == all(fits_some(experts_tiles, *one, group_size) for one in sides)


FAMILIES = sorted(models.configs())
NAMED_ALWAYS = ("lm_head", "model.embed_tokens")


def model_config(family, **changes):
    return dict(models.configs()[family].to_dict()) | changes


@pytest.fixture(scope="module")
def specs():
    return {family: release_specs(model_config(family)) for family in FAMILIES}


ALL_ROUTERS = r"re:.*\.mlp\.gate(\.weight)?$"
REFUSED = [
    # family, entries, reader and tensor in the message, portable spelling in the hint
    ("glm4_moe", ["re:.*mlp.gate$"], r"slime .*\.\{2\.\.11\}\.mlp\.gate\.weight", r"re:.*mlp.gate(\.weight)?$"),
    ("glm4_moe", [], r"slime .*model\.layers\.\{2\.\.11\}\.mlp\.gate\.weight", ALL_ROUTERS),
    (
        "qwen2-untied",
        ["model.layers.1"],
        r"SGLang 0\.5\.16 and slime .*\{1,10\.\.11\}\.mlp",
        r"re:model\.layers\.1(\..*)?$",
    ),
    ("qwen2-untied", [r"re:.*o_proj\..*"], r"slime .*o_proj\.weight", r"re:.*o_proj(\.weight)?$"),
    ("qwen2-untied", [r"re:.*mlp\.gate\.*"], r"SGLang 0\.5\.16 and SGLang 0\.5\.23 .*mlp\.up_proj", None),
    ("qwen2-untied", ["self_attn.o_proj"], r"\{0\.\.11\}\.self_attn\.o_proj", r"re:.*\.self_attn\.o_proj(\..*)?$"),
    (
        "qwen2-untied",
        [r"re:.*\.self_attn\.q_proj(\.weight)?$"],
        r"SGLang 0\.5\.16 and SGLang 0\.5\.23 .*\{0\.\.11\}\.self_attn\.q_proj",
        r"re:.*\.self_attn\.(q|k|v|qkv)_proj(\.weight)?$",
    ),
    (
        "qwen3_moe",
        [ALL_ROUTERS, r"re:.*\.experts\.(5|6)\..*"],
        r"SGLang 0\.5\.16 and SGLang 0\.5\.23 .*\{0\.\.11\}\.mlp\.experts\.\{5\.\.6\}\.down_proj",
        r"re:.*\.experts\..*",
    ),
    (
        "qwen3_moe",
        [ALL_ROUTERS, "model.layers.3.mlp.experts.1"],
        r"slime .*model\.layers\.3\.mlp\.experts\.\{1,10\.\.11\}\.down_proj",
        r"re:model\.layers\.3\.mlp\.experts\..*",
    ),
    # Cutting this one behind "experts" leaves a bracket open.
    ("qwen3_moe", [ALL_ROUTERS, r"re:.*(experts\.5|nothing)\..*"], r"\.experts\.5\.down_proj", None),
]


@pytest.mark.parametrize(("family", "entries", "message", "spelling"), REFUSED, ids=lambda value: str(value)[:40])
def test_refuses_what_readers_take_differently(specs, family, entries, message, spelling):
    config = model_config(family)
    hint = refusal(message, select_int4_weights, specs[family], config, scheme(*NAMED_ALWAYS, *entries)).hint or ""
    if spelling is None:
        return
    assert f"'{spelling}'" in hint
    followed = [*NAMED_ALWAYS, *(entry for entry in entries if f"replace '{entry}'" not in hint), spelling]
    select_int4_weights(specs[family], config, scheme(*followed))  # raises nothing: every reader agrees


def test_advice_is_given_for_a_few_entries_at_a_time(specs):
    shards = tuple(f"model.layers.{layer}.self_attn.q_proj" for layer in range(12))
    with pytest.raises(CkptkitError, match=r"would pack model\.layers\.\{0\.\.11\}\.self_attn\.q_proj") as caught:
        select_int4_weights(specs["qwen2-untied"], model_config("qwen2-untied"), scheme(*NAMED_ALWAYS, *shards))
    hint = caught.value.hint or ""
    assert hint.count("replace") == 3
    assert hint == text_with("9 entries")


def test_qwen3_moe_may_name_all_shards_of_a_fused_layer(specs):
    """Its class in SGLang takes qkv_proj apart; that of Qwen2 does not."""
    shards = [f"model.layers.3.self_attn.{name}_proj" for name in "qkv"]
    config = model_config("qwen3_moe")
    usual = default_ignore(config)
    packed, fewer = (select_int4_weights(specs["qwen3_moe"], config, scheme(*usual, *more)) for more in ([], shards))
    assert packed - fewer == {f"{shard}.weight" for shard in shards}
    config = model_config("qwen2-untied")
    with pytest.raises(CkptkitError, match=r"would pack model\.layers\.3\.self_attn\.k_proj"):
        select_int4_weights(specs["qwen2-untied"], config, scheme(*default_ignore(config), *shards))


def test_the_output_embedding_must_be_named(specs):
    with pytest.raises(CkptkitError, match=r"transformers and slime .*lm_head\.weight") as caught:
        select_int4_weights(specs["qwen2-untied"], model_config("qwen2-untied"), scheme("model.embed_tokens"))
    assert "add 'lm_head'" in str(caught.value)


def test_a_harmless_addition_is_accepted(specs):
    config = model_config("glm4_moe")
    plain = select_int4_weights(specs["glm4_moe"], config, scheme(*default_ignore(config)))
    for entry in ("re:.*mlp.gate$", r"re:.*mlp\.gate\..*", "re:.*not_there.*"):
        assert select_int4_weights(specs["glm4_moe"], config, scheme(*default_ignore(config), entry)) == plain


def test_a_tensor_outside_the_model_is_kept_only_when_named(specs):
    config = model_config("qwen2-untied")
    more = specs["qwen2-untied"] | {"extra.proj.weight": TensorSpec("extra.proj.weight", (64, 64), "bfloat16")}
    refusal(r"extra\.proj\.weight", select_int4_weights, more, config, scheme(*default_ignore(config)))
    assert "extra.proj.weight" not in select_int4_weights(more, config, scheme(*default_ignore(config), "extra.proj"))


def test_draft_layers_stay_as_they_are():
    """GLM-4.5 stores its draft layer as layer number num_hidden_layers; SGLang builds it as model.decoder."""
    config = model_config("glm4_moe", num_nextn_predict_layers=1)
    ignore = default_ignore(config)
    assert ignore[-1] == r"re:model\.(layers\.12|decoder)\..*"
    parts = ("eh_proj", "self_attn.q_proj", "mlp.experts.0.gate_proj", "mlp.gate", "shared_head.head")
    names = [f"model.layers.12.{part}.weight" for part in parts]
    draft = {name: TensorSpec(name, (64, 128), "bfloat16") for name in names}
    specs = release_specs(model_config("glm4_moe")) | draft
    assert select_int4_weights(specs, config, scheme(*ignore)).isdisjoint(draft)
    engines = r"SGLang 0\.5\.16 and SGLang 0\.5\.23 would pack model\.layers\.12\.self_attn\.q_proj"
    with pytest.raises(CkptkitError, match=rf"\n  vLLM 0\.26 and vLLM 0\.33 and {engines}") as caught:
        select_int4_weights(specs, config, scheme(*ignore[:-1]))
    # SGLang's eh_proj, router and head of the draft layer are none that it quantizes.
    assert "slime would pack model.layers.12.eh_proj.weight" in str(caught.value)
    assert f"add '{ignore[-1]}'" in str(caught.value)
    # Naming the layer as the checkpoint does is not enough for SGLang.
    refusal(rf"\n  {engines}", select_int4_weights, specs, config, scheme(*ignore[:-1], r"re:model\.layers\.12\..*"))


def test_groups_must_divide(specs):
    config = model_config("glm4_moe")
    with pytest.raises(CkptkitError, match=r"128.*96, 288, 320.*\{0\.\.11\}\.self_attn\.o_proj") as caught:
        select_int4_weights(specs["glm4_moe"], config, scheme(*default_ignore(config), group_size=128))
    hint = caught.value.hint or ""
    assert "--group-size 32" in hint
    entries = re.findall(r"--ignore '([^']+)'", hint)
    assert r"re:.*\.mlp\.experts\..*" in entries
    packed = select_int4_weights(specs["glm4_moe"], config, scheme(*default_ignore(config), *entries, group_size=128))
    assert "model.layers.0.self_attn.q_proj.weight" in packed
    assert "model.layers.3.mlp.experts.5.gate_proj.weight" not in packed


@pytest.mark.parametrize(("shape", "dtype"), [((64, 128), "float8_e4m3fn"), ((2, 64, 128), "bfloat16")])
def test_only_float_matrices_can_be_quantized(specs, shape, dtype):
    name = "model.layers.0.self_attn.q_proj.weight"
    config = model_config("qwen2-untied")
    with pytest.raises(CkptkitError, match=r"layers\.0\.self_attn\.q_proj\.weight .* cannot be quantized"):
        select_int4_weights(
            specs["qwen2-untied"] | {name: TensorSpec(name, shape, dtype)}, config, scheme(*default_ignore(config))
        )


def test_an_ignore_list_without_the_head_promises_a_packed_head(specs):
    for family, promised in (("qwen2-untied", True), ("qwen2-tied", False)):
        finished = model_config(family) | {"quantization_config": quantization_config(scheme("model.embed_tokens"))}
        assert ("lm_head" in packed_modules(specs[family], finished)) is promised
