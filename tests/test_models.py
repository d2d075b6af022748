"""The models that tests compare with can tell their matrices apart by shape alone."""

from itertools import combinations

import pytest
from support import models


def kinds(name):
    """Every size along which a matrix of this model, in HF, Megatron or SGLang, meets another kind of matrix."""
    config = models.configs()[name]
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    sizes = {
        "hidden": config.hidden_size,
        "vocabulary": config.vocab_size,
        "vocabulary padded for one rank": -(-config.vocab_size // 128) * 128,
        "vocabulary padded for two ranks": -(-config.vocab_size // 256) * 256,
        "query": query,
        "key or value": key,
        "query, key and value": query + 2 * key,
        "ffn": config.intermediate_size,
        "gate and up": 2 * config.intermediate_size,
    }
    if hasattr(config, "moe_intermediate_size"):
        sizes |= {"expert": config.moe_intermediate_size, "expert's gate and up": 2 * config.moe_intermediate_size}
    return sizes


@pytest.mark.parametrize("name", list(models.configs()))
def test_kinds_of_matrices_share_no_size_and_divide_into_groups_and_over_two_ranks(name):
    sizes = kinds(name)
    assert [pair for pair in combinations(sizes, 2) if sizes[pair[0]] == sizes[pair[1]]] == []
    assert [kind for kind, size in sizes.items() if size % 32 or size % 2] == []
    config = models.configs()[name]
    assert (config.num_attention_heads % 2, config.num_key_value_heads % 2) == (0, 0)
