"""Which parallel sizes a model divides over, as real megatron-core says too."""

import pytest
from families import CASES as CASES_OF_FAMILIES
from support import models
from support.installed import require_megatron
from support.megatron_sizes import refused_by_megatron
from support.messages import refusal

from ckptkit.converters.megatron.parallel import (
    ParallelSizes,
    check_sizes,
    default_etp,
    padded_vocab,
    refusals,
    with_remainder,
)
from ckptkit.converters.planner import dims_of

DIMS = dims_of(models.configs()["qwen2-tied"].to_dict())
ONE_LAYER = {"num_hidden_layers": 1}
DENSE = models.configs()["qwen2-tied"].to_dict() | ONE_LAYER
EIGHT_HEADS = DENSE | {"num_attention_heads": 8, "head_dim": 32}
TWELVE_HEADS = EIGHT_HEADS | {"num_attention_heads": 12, "num_key_value_heads": 4}
EXPERTS = models.configs()["qwen3_moe"].to_dict() | ONE_LAYER
LINEAR = {"layer_types": ["linear_attention"], "num_nextn_predict_layers": 0}
HYBRID = CASES_OF_FAMILIES["qwen3_next"].config().to_dict() | ONE_LAYER | LINEAR
BIASED = CASES_OF_FAMILIES["gpt_oss"].config().to_dict() | ONE_LAYER | {"layer_types": ["full_attention"]}
MIXERS = CASES_OF_FAMILIES["nemotron_h"].config().to_dict() | {"layers_block_type": ["mamba"]}

# A config, parallel sizes, and what of the model Megatron refuses at these sizes.
CASES = [
    (DENSE, ParallelSizes(tp=2), None),
    (DENSE, ParallelSizes(tp=4), "num_attention_heads = 10"),
    (EIGHT_HEADS, ParallelSizes(tp=4), None),  # 2 query groups on 4 ranks
    (EIGHT_HEADS, ParallelSizes(tp=8), None),
    (EIGHT_HEADS | {"num_key_value_heads": 1}, ParallelSizes(tp=8), None),
    (EIGHT_HEADS | {"num_key_value_heads": 8}, ParallelSizes(tp=8), None),
    (TWELVE_HEADS, ParallelSizes(tp=6), "num_key_value_heads = 4"),
    (TWELVE_HEADS, ParallelSizes(tp=12), "rows of linear_qkv = 640"),
    (EIGHT_HEADS | {"num_key_value_heads": 1, "head_dim": 2}, ParallelSizes(tp=8), "rows of linear_qkv = 20"),
    (EIGHT_HEADS | {"intermediate_size": 290}, ParallelSizes(tp=4), "intermediate_size = 290"),
    (DENSE, ParallelSizes(ep=2), "the number of experts = 0"),
    (EXPERTS, ParallelSizes(ep=4), None),
    (EXPERTS, ParallelSizes(ep=5), "the number of experts = 12"),
    (EXPERTS, ParallelSizes(tp=2, etp=2), None),
    (EXPERTS | {"moe_intermediate_size": 95}, ParallelSizes(tp=2), None),
    (EXPERTS | {"moe_intermediate_size": 95}, ParallelSizes(tp=2, etp=2), "moe_intermediate_size = 95"),
    (BIASED, ParallelSizes(tp=2, ep=2), None),
    (BIASED, ParallelSizes(tp=2, etp=2), "etp = 2"),
    (HYBRID | {"num_attention_heads": 8}, ParallelSizes(tp=4), None),
    (HYBRID | {"num_attention_heads": 8}, ParallelSizes(tp=8), "linear_num_key_heads = 4"),
    (MIXERS | {"num_attention_heads": 8}, ParallelSizes(tp=4), None),
    (MIXERS | {"num_attention_heads": 8}, ParallelSizes(tp=8), "n_groups = 4"),
]


def test_refusals_name_what_does_not_divide():
    for config, sizes, refused in CASES:
        assert [one.actual for one in refusals(dims_of(config), sizes)] == ([refused] if refused else []), sizes


def test_megatron_refuses_the_same_sizes():
    require_megatron()
    said = refused_by_megatron((config, sizes) for config, sizes, _ in CASES)
    assert [bool(error) for error in said] == [bool(refused) for *_, refused in CASES]


@pytest.mark.parametrize(
    ("layers", "sizes", "last"),
    [
        (92, ParallelSizes(pp=4), None),
        (92, ParallelSizes(pp=8), 8),  # 7 x 12 + 8
        (61, ParallelSizes(pp=8), 5),  # 7 x 8 + 5
        (11, ParallelSizes(pp=3), 3),
        (12, ParallelSizes(pp=5), None),  # four stages of 3 leave nothing
        (12, ParallelSizes(pp=8), None),
        (11, ParallelSizes(pp=2, vpp=2), None),  # Megatron cannot cut a stage of 6 and one of 5 into chunks alike
    ],
)
def test_layers_that_do_not_divide_leave_the_last_stage_the_rest(layers, sizes, last):
    assert with_remainder(sizes, layers).last == last


def test_uneven_pipeline_gives_its_stages_or_is_refused():
    sizes = ParallelSizes(pp=3, first=2, last=4)
    check_sizes(sizes, DIMS)
    assert sizes.pipeline(DIMS).stages == ((tuple(range(2)),), (tuple(range(2, 8)),), (tuple(range(8, 12)),))
    assert str(sizes) == "TP1 PP3, first stage 2 layers, last stage 4 layers"
    assert str(ParallelSizes(pp=2, layout="Et*8|t*4L")) == "TP1 PP2, Et*8|t*4L"
    refusal("9.*2.*stages", check_sizes, ParallelSizes(pp=3, last=3), DIMS)


def test_world_size_is_the_least_common_multiple():
    sizes = (ParallelSizes(), ParallelSizes(tp=2, pp=2), ParallelSizes(tp=2, ep=2), ParallelSizes(tp=2, ep=2, etp=2))
    assert [one.world for one in sizes] == [1, 4, 2, 4]
    assert [ParallelSizes(tp=4, pp=3, ep=6).world, ParallelSizes(pp=2, ep=4, vpp=3).world] == [36, 8]


def test_defaults_are_those_of_megatron():
    assert [default_etp(2, 1), default_etp(2, 4)] == [2, 1]
    rows = [padded_vocab(*one) for one in ((352, 1), (352, 2), (151936, 1), (151552, 8))]
    assert rows == [384, 512, 151936, 151552]
