"""The lists of options by release, held against the programs themselves, as far as they are installed."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.processes import python

from verify.launch.options import releases
from verify.launch.options.releases import names, trainer_options
from verify.launch.options.tables import GPUS, MODEL, PATHS, RUN, SWITCHES

FOLDER = Path(releases.__file__).parent / "releases"
PROGRAMS = sorted(path.stem for path in FOLDER.iterdir())
# Prints what SGLang's parser takes.
SGLANG = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(add_help=False)
ServerArgs.add_cli_args(parser)
print(json.dumps([option for action in parser._actions for option in action.option_strings]))
"""
MEGATRON = """
import dataclasses, json
from megatron.core.transformer.transformer_config import MLATransformerConfig
fields = dataclasses.fields(MLATransformerConfig)
print(json.dumps([[one.name, str(one.type), one.default is True] for one in fields]))
"""
# Options that a fork has, or that only an older release than those of the lists had.
FORKS = {
    *("--original-max-position-embeddings", "--yarn-original-max-position-embeddings", "--yarn-beta-fast"),
    *("--yarn-beta-slow", "--yarn-correction-range-round-to-int", "--no-yarn-correction-range-round-to-int"),
    "--sglang-dp",
    *("--dsa-indexer-topk-freq", "--dsa-indexer-skip-topk-offset", "--dsa-indexer-k-norm-epsilon"),
}


def test_every_list_names_its_source_its_releases_and_each_name_once() -> None:
    for program in PROGRAMS:
        source, line, *rows = (FOLDER / f"{program}.txt").read_text().splitlines()
        assert source.startswith("# ")
        assert line.startswith("# releases: ")
        order = line.removeprefix("# releases: ").split()
        found = [row.split() for row in rows]
        assert len({row[0] for row in found}) == len(found) > 50
        for _, *span in found:
            assert len(span) in (0, 2)
            assert not span or order.index(span[0]) <= order.index(span[1])


def test_every_option_that_preflight_reads_is_in_a_list() -> None:
    read = {*MODEL, *SWITCHES, *RUN, *GPUS, *PATHS} - FORKS
    assert sorted(one for one in read if one not in trainer_options() and "dsa" not in one) == []


@pytest.mark.nightly
@pytest.mark.sglang
@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_sglangs_own_parser_takes_nothing_that_the_list_lacks() -> None:
    options = json.loads(python("-c", SGLANG).stdout.splitlines()[-1])
    known = names("sglang")
    missing = [one for one in options if one.removeprefix("--") not in known and not one.startswith("--no-")]
    assert [one for one in missing if one.startswith("--")] == []


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_fields_of_megatron_cores_configuration_are_options_of_the_list() -> None:
    """Older releases make fewer of them options, by hand; every name that is one of a release is in the list."""
    fields = json.loads(python("-c", MEGATRON).stdout.splitlines()[-1])
    known = names("megatron-lm")
    spelled = {name for name, _, _ in fields if name.replace("_", "-") in known}
    spelled |= {name for name, _, on in fields if on and f"no-{name.replace('_', '-')}" in known}
    assert {"sequence_parallel", "num_attention_heads", "moe_token_dispatcher_type", "recompute_method"} <= spelled
    assert len(spelled) > len(fields) // 2


def test_rolls_training_arguments_are_those_of_transformers() -> None:
    from transformers import Seq2SeqTrainingArguments

    fields = {one.name for one in dataclasses.fields(Seq2SeqTrainingArguments)}
    assert sorted(fields - names("roll")) == []


def test_names_that_a_misspelling_lies_near_are_no_misspelling_of_one_another() -> None:
    """What one release calls otherwise than the next is right in both."""
    for program, pair in {
        "slime": ("actor-num-gpus-per-node", "critic-num-gpus-per-node"),
        "verl": ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu"),
        "nemo-rl": ("tensor_parallel_size", "tensor_model_parallel_size"),
        "roll": ("device_mapping", "num_gpus_per_worker"),
    }.items():
        assert set(pair) <= names(program)
