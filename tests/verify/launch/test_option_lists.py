"""The lists of option names, against the programs themselves as far as they are installed."""

from __future__ import annotations

import dataclasses
import json
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from support.forking import run_in_engine
from support.processes import python

from ckptkit.verify.launch.options import names as lists
from ckptkit.verify.launch.options.names import names, trainer_options, trainer_switches
from ckptkit.verify.launch.options.tables import GPUS, MODEL, PATHS, RUN, SWITCHES

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


def test_every_list_names_its_release_and_each_name_once() -> None:
    for program in PROGRAMS:
        first, *rows = (FOLDER / f"{program}.txt").read_text().splitlines()
        found = " ".join(rows).split()
        assert first.split()[:2] == ["#", program]
        assert len(first.split()) > 2
        assert len(set(found)) == len(found) > 50


def test_every_option_that_preflight_reads_is_in_a_list() -> None:
    read = {*MODEL, *SWITCHES, *RUN, *GPUS, *PATHS} - FORKS
    unlisted = [one for one in read if one not in trainer_options() and "dsa" not in one and "--vllm" not in one]
    assert sorted(unlisted) == []


def test_what_takes_no_value_is_told_from_what_does() -> None:
    assert {"--colocate", "--use-kl-loss", "--swiglu", "--sglang-enable-dp-attention"} <= trainer_switches()
    assert trainer_switches().isdisjoint({"--load", "--num-layers", "--rollout-batch-size", "--sglang-ep-size"})


@pytest.mark.nightly
@pytest.mark.sglang
@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_sglangs_own_parser_takes_nothing_that_the_list_lacks() -> None:
    options = json.loads(python("-c", SGLANG).stdout.splitlines()[-1])
    known = names("sglang")
    assert [one for one in options if one.startswith("--") and one[2:] not in known.every] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ENGINES)
def test_registries_are_those_of_the_installed_release(engine: str, tmp_path: Path) -> None:
    """Written anew in the engine's Python: another release is another file."""
    log = tmp_path / "log"
    assert run_in_engine(engine, log, "lab.option_names", engine, tmp_path), log.read_text()[-3000:]
    written, kept = (folder / f"{engine}.json" for folder in (tmp_path, ROOT / "quant" / "engines"))
    assert json.loads(written.read_text()) == json.loads(kept.read_text())


def test_rolls_training_arguments_are_those_of_transformers() -> None:
    from transformers import Seq2SeqTrainingArguments

    fields = {one.name for one in dataclasses.fields(Seq2SeqTrainingArguments)}
    assert sorted(fields - names("roll").every) == []


def test_names_are_read_from_a_parser_and_from_classes(tmp_path: Path) -> None:
    """Of a made-up slime and a made-up NeMo-RL, as `lab/option_names.py` reads their checkouts."""
    spec = spec_from_file_location("option_names", ROOT / "lab" / "option_names.py")
    assert spec is not None
    assert spec.loader is not None
    tool = module_from_spec(spec)
    sys.modules["option_names"] = tool
    spec.loader.exec_module(tool)
    (tmp_path / "slime").mkdir()
    (tmp_path / "nemo_rl").mkdir()
    (tmp_path / "slime/arguments.py").write_text(
        "parser.add_argument('-a', '--aim', type=int)\nreset_arg(parser, '--load', type=str)\n"
        "parser.add_argument('--fast', action='store_true')\n"
        "parser.add_argument('--even', action=argparse.BooleanOptionalAction)\n"
    )
    source = tool.Source(("slime/**/arguments.py",), ("nemo_rl/*.py",), ("*.yaml",))
    found = dict(tool.options_of(tmp_path, source))
    assert found == {"aim": False, "load": False, "fast": True, "even": True, "no-even": True}
    text = "class PolicyConfig(TypedDict):\n  size: int\nclass Other:\n  no: int\n"
    (tmp_path / "nemo_rl/config.py").write_text(text)
    (tmp_path / "job.yaml").write_text("policy: {name: [{deep: 1}]}\n")
    assert list(tool.settings_of(tmp_path, source)) == ["size", "policy", "name", "deep"]
