"""The options that preflight knows, and how words are split into them, against the programs themselves."""

import argparse
import ast
import contextlib
import dataclasses
import io
import itertools
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.forking import run_in_engine
from support.processes import python

from ckptkit.converters.megatron.argument_table import ARGUMENTS
from ckptkit.verify.launch.options import names as lists
from ckptkit.verify.launch.options.arguments import parse_arguments
from ckptkit.verify.launch.options.argv import last, options_of
from ckptkit.verify.launch.options.names import names, trainer_options, trainer_switches
from ckptkit.verify.launch.options.tables import GPUS, MODEL, PATHS, RUN, SWITCHES
from ckptkit.verify.launch.words import Word

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(lists.__file__).parent / "names"
PROGRAMS = sorted(path.stem for path in FOLDER.iterdir())
# Prints what SGLang's parser takes.
SGLANG = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(add_help=False)
ServerArgs.add_cli_args(parser)
print(json.dumps([option for action in parser._actions for option in action.option_strings]))
"""
ENGINES = [pytest.param("sglang", marks=pytest.mark.sglang), pytest.param("vllm", marks=pytest.mark.vllm)]
# Options that a fork has, or that only an older release than those of the lists had.
FORKS = {
    *("--original-max-position-embeddings", "--yarn-original-max-position-embeddings", "--yarn-beta-fast"),
    *("--yarn-beta-slow", "--yarn-correction-range-round-to-int", "--no-yarn-correction-range-round-to-int"),
    *("--sglang-dp", "--beta-fast", "--beta-slow"),
    *("--dsa-indexer-topk-freq", "--dsa-indexer-skip-topk-offset", "--dsa-indexer-k-norm-epsilon"),
}


def test_every_list_names_its_release_and_each_name_once():
    for program in PROGRAMS:
        first, *rows = (FOLDER / f"{program}.txt").read_text().splitlines()
        found = " ".join(rows).split()
        assert first.split()[:2] == ["#", program]
        assert len(first.split()) > 2
        assert len(set(found)) == len(found) > 50


def test_every_option_that_preflight_reads_is_in_a_list():
    read = {*MODEL, *SWITCHES, *RUN, *GPUS, *PATHS} - FORKS
    unlisted = [one for one in read if one not in trainer_options() and "dsa" not in one and "--vllm" not in one]
    assert sorted(unlisted) == []


def test_what_takes_no_value_is_told_from_what_does():
    assert {"--colocate", "--use-kl-loss", "--swiglu", "--sglang-enable-dp-attention"} <= trainer_switches()
    assert trainer_switches().isdisjoint({"--load", "--num-layers", "--rollout-batch-size", "--sglang-ep-size"})


@pytest.mark.nightly
@pytest.mark.sglang
@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_sglangs_own_parser_takes_nothing_that_the_list_lacks():
    options = json.loads(python("-c", SGLANG).stdout.splitlines()[-1])
    known = names("sglang")
    assert [one for one in options if one.startswith("--") and one[2:] not in known.every] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ENGINES)
def test_registries_are_those_of_the_installed_release(engine, tmp_path):
    """Written anew in the engine's Python: another release is another file."""
    log = tmp_path / "log"
    assert run_in_engine(engine, log, "lab.option_names", engine, tmp_path), log.read_text()[-3000:]
    written, kept = (folder / f"{engine}.json" for folder in (tmp_path, ROOT / "quant" / "engines"))
    assert json.loads(written.read_text()) == json.loads(kept.read_text())


def test_rolls_training_arguments_are_those_of_transformers():
    from transformers import Seq2SeqTrainingArguments

    fields = {one.name for one in dataclasses.fields(Seq2SeqTrainingArguments)}
    assert sorted(fields - names("roll").every) == []


# Words of a parser with `--load PATH`, `--num-layers N` and the switch `--swiglu`, and what may stand beside them.
WORDS = (
    *("--load", "--load=", "--load=/a=b", "--load=--swiglu", "--loa", "--num-layers", "--num-layers=8"),
    "--num-layers=",
    *("--swiglu", "--swiglu=1", "--other=x", "--other x", "", "/b", "-", "-x", "-1", "-.5", "-1e5", "8", "1_0"),
)
LINES = [list(words) for length in (1, 2, 3) for words in itertools.product(WORDS, repeat=length)]


PARSER = argparse.ArgumentParser(allow_abbrev=False)
PARSER.add_argument("--load")
PARSER.add_argument("--num-layers", type=int)
PARSER.add_argument("--swiglu", action="store_true")


def by_argparse(words):
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return vars(PARSER.parse_known_args(words)[0])
    except SystemExit:
        return None


def by_us(words):
    options, given = options_of([Word(word) for word in words]), parse_arguments([Word(word) for word in words])
    if given.refused or any(one.value is None for one in options if one.name in ("--load", "--num-layers")):
        return None
    load, layers = last(options, "--load"), last(options, "--num-layers")
    assert (layers is None) == (given.value("num_layers") is None)
    return {
        "load": load.value.text if load and load.value else None,
        "num_layers": given.value("num_layers"),
        "swiglu": given.value("swiglu", False),
    }


def test_options_are_split_up_as_argparse_does():
    assert [words for words in LINES if by_us(words) != by_argparse(words)] == []


@pytest.mark.parametrize("words", [["--ids", "1", "-2", "3", "--load", "/a"], ["--ids", "--load", "/a"], ["--ids=1"]])
def test_an_option_of_many_values_has_those_that_argparse_gives_it(words):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--ids", nargs="*")
    option = last(options_of([Word(word) for word in words]), "--ids")
    assert [word.text for word in option.values] == parser.parse_known_args(words)[0].ids


# Prints every field of Megatron's configurations with its annotation and default, and GPTModel's rope_scaling_factor.
ASK = """
import dataclasses, inspect, json
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
known = (*dataclasses.fields(MLATransformerConfig), *dataclasses.fields(TransformerConfig))
fields = {one.name: [str(one.type), repr(one.default)] for one in known}
factor = inspect.signature(GPTModel.__init__).parameters["rope_scaling_factor"].default
print(json.dumps([fields, factor]))
"""
# Defaults of Megatron-LM's arguments that are not those of its configuration, which has the second.
OTHER_DEFAULTS = {"kv_lora_rank": (32, "512"), "rotary_scaling_factor": (1.0, "40")}


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_the_table_has_megatron_cores_defaults_and_names_of_its_settings():
    fields, factor = json.loads(python("-c", ASK).stdout.splitlines()[-1])
    # What CK718 and CK719 take where a launch says nothing.
    assert factor == 8.0
    assert (fields["attention_dropout"][1], fields["hidden_dropout"][1]) == ("0.1", "0.1")
    assert (fields["beta_fast"][1], fields["moe_router_topk"][1]) == ("32", "2")
    kinds = {int: ("int",), float: ("float",), str: ("str", "Literal")}
    named = [
        (name, kind) for name, kind in MODEL.values() if name in fields and name != "rotary_base"
    ]  # a whole number
    typed = [(fields[name][0], kinds[kind]) for name, kind in named if kind in kinds]
    assert len(typed) > 10
    assert [text for text, names in typed if not any(name in text for name in names)] == []
    compared = [row for row in ARGUMENTS if (row.config or row.name) in fields and row.starts is not None]
    assert len(compared) > 35
    for row in compared:
        default = fields[row.config or row.name][1]
        if row.name in OTHER_DEFAULTS:
            assert (row.starts, default) == OTHER_DEFAULTS[row.name]
        elif default == "None":
            assert row.starts in (0, 1), row.name  # what is not limited, scaled or there
        else:
            assert ast.literal_eval(default) == row.starts, row.name
    assert [row.name for row in ARGUMENTS if row.config and row.config not in fields] == []
