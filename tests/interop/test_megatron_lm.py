"""Megatron-LM's own `load_checkpoint` and `save_checkpoint`, on several ranks.

Its training package comes with megatron-core since 0.19; `MEGATRON_LM` names a checkout to use instead.
"""

import json
import os
from functools import partial
from importlib.util import find_spec

import pytest
from support import models

from ckptkit.app.api import convert
from ckptkit.converters.megatron.arguments import launch_flags, megatron_args
from ckptkit.converters.megatron.parallel import ParallelSizes
from ckptkit.converters.planner import dims_of
from interop.megatron_training import Training, run_training
from interop.slime_runs import release as saved


@pytest.fixture(scope="module")
def megatron_lm(checkout):
    """The checkout of Megatron-LM; None for the training package that is installed."""
    if os.environ.get("MEGATRON_LM") or find_spec("megatron") is None or find_spec("megatron.training") is None:
        return checkout("MEGATRON_LM")
    return None


@pytest.fixture(scope="module")
def train(tmp_path_factory, megatron_lm):
    def run(source, load, save, sizes):
        config = json.loads((source / "config.json").read_text())
        flags = launch_flags(megatron_args(dims_of(config)))
        training = Training(config, flags, str(source), str(load), str(save), sizes)
        return run_training(training, tmp_path_factory.mktemp("run") / "job", megatron_lm)

    return run


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return partial(saved, tmp_path_factory.mktemp("hf"))


def assert_all_equal(ranks, world, iteration):
    """Every rank holds exactly its slice of every tensor: nothing unwritten, unknown or different; strict at once."""
    assert [rank.wrong for rank in ranks] == [[]] * world
    assert [set(rank.verdicts) for rank in ranks] == [{"equal"}] * world
    assert {rank.iteration for rank in ranks} == {iteration}
    assert all(rank.strict and all(rank.strict) for rank in ranks)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen2-tied", ParallelSizes(tp=2, pp=2)),
        ("qwen3_moe", ParallelSizes(tp=2, pp=2)),
        ("glm4_moe-mtp", ParallelSizes(pp=2, ep=2)),
        ("llama", ParallelSizes()),
        ("deepseek_v3", ParallelSizes()),
        ("kimi_k2", ParallelSizes()),
        ("qwen3_next", ParallelSizes()),
        ("gpt_oss", ParallelSizes()),
        ("minimax_m2", ParallelSizes()),
    ],
    ids=str,
)
def test_release_loads_strictly_and_what_megatron_saves_of_it_converts_back(name, sizes, release, train, tmp_path):
    source = release(name)
    convert(source, tmp_path / "ckptkit")
    assert_all_equal(train(source, tmp_path / "ckptkit", tmp_path / "saved", sizes), sizes.world, 0)
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "10"
    convert(tmp_path / "saved", tmp_path / "back", hf=source)
    assert models.unequal(tmp_path / "back", source) == []


def test_iteration_loads_strictly(release, train, tmp_path):
    source, root = release("qwen2-tied"), tmp_path / "ckptkit"
    convert(source, root)
    (root / "release").rename(root / "iter_0000005")
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    sizes = ParallelSizes(pp=2)
    assert_all_equal(train(source, root, tmp_path / "saved", sizes), 2, 0)


def test_what_megatron_saved_loads_at_other_sizes(release, train, tmp_path):
    source = release("qwen3_moe")
    convert(source, tmp_path / "ckptkit")
    train(source, tmp_path / "ckptkit", tmp_path / "first", ParallelSizes(pp=2))
    assert_all_equal(train(source, tmp_path / "first", tmp_path / "second", ParallelSizes(tp=2, ep=2)), 2, 10)
