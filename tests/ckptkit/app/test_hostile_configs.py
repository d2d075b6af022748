"""A config.json with values that no model has: every command names the key, soon, and none ends in a traceback."""

import re
import resource

import click
import pytest
from click.testing import CliRunner
from mutations.edits import edit_config
from support import published
from support.nightly import daily

from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError

CHANGES = [
    ({"num_hidden_layers": 1_001}, "num_hidden_layers is 1001, not at most 1,000"),
    ({"num_hidden_layers": "4"}, "num_hidden_layers.*4"),
    ({"num_hidden_layers": True}, "num_hidden_layers.*True"),
    ({"num_experts": 10**9}, "num_experts.*1000000000.*128,000"),
    ({"num_experts": -3}, "num_experts.*-3"),
    ({"vocab_size": 10**12}, "vocab_size is 1000000000000, not at most 2147483648"),
    ({"hidden_size": 64.5}, "hidden_size.*64.5"),
    ({"rope_theta": 10**99, "rope_parameters": 7}, "rope_parameters is 7, not an object"),
    ({"rope_parameters": {"rope_theta": [10]}}, r"rope_theta is \[10\], not a finite number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a finite number"),
    ({"layer_types": [["full_attention"]]}, r"layer_types is \[\['full_attention'\]\], not a list"),
    ({"layer_types": ["x"] * 100_000}, r"layer_types.*\['x',.*\.\.\.\].*1,000"),
    ({"mlp_only_layers": "all"}, "mlp_only_layers.*1,000"),
    ({"decoder_sparse_step": 10**30}, "decoder_sparse_step is 1000000000000000000000000000000, not at most"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step.*0"),
    ({"tie_word_embeddings": "maybe"}, "tie_word_embeddings is 'maybe'"),
    ({"model_type": "../../outside"}, "model_type '../../outside'"),
    ({"model_type": ["qwen3_moe"]}, r"model_type \['qwen3_moe'\]"),
    ({"architectures": 7}, "architectures.*7"),
    ({"architectures": ["A"] * 1_000_000}, "10000..*250000"),
    ({f"key{number}": 1 for number in range(100_000)}, "the top is '1000.. keys', not at most 2,000"),
    ({"dtype": "garbage"}, "bfloat16"),
    ({"text_config": 7}, "text_config is 7, not an object"),
]
_MAX_MEMORY = 1 << 20  # kB more than before


@pytest.fixture
def hostile(copy_of, releases):
    return copy_of(releases("qwen3_moe"))


def run(*command):
    """Runs a command in this process, and returns all that it says. Fails for a traceback, and for much memory."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = CliRunner().invoke(cli, list(map(str, command)), standalone_mode=False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < _MAX_MEMORY
    error = result.exception
    assert error is None or isinstance(error, (CkptkitError, click.ClickException, SystemExit)), repr(error)
    said = error.message if isinstance(error, (CkptkitError, click.ClickException)) else result.output
    return result, said


@pytest.mark.parametrize("row", daily(CHANGES, CHANGES[::3]), ids=[message[:60] for _, message in CHANGES])
def test_value_that_no_model_has_is_refused_by_every_command(row, hostile, tmp_path):
    change, message = row
    edit_config(hostile, **change)
    for command in (
        ("convert", hostile, tmp_path / "out", "--dry-run"),
        ("convert", hostile, tmp_path / "out"),
        ("quantize", hostile, tmp_path / "out", "--group-size", "32"),
        ("inspect", hostile, "--megatron-args"),
    ):
        result, said = run(*command)
        assert isinstance(result.exception, CkptkitError), command
        assert re.search(message, said), (command, said)
        assert len(said) < 1_000
    assert not (tmp_path / "out").exists()
    run("inspect", hostile)


@pytest.mark.parametrize("row", daily(CHANGES, CHANGES[::6]), ids=[message[:60] for _, message in CHANGES])
def test_verify_and_preflight_name_the_value_that_no_model_has(row, hostile):
    change, message = row
    edit_config(hostile, **change)
    for command in (("verify", hostile, "--json"), ("preflight", "--hf-checkpoint", hostile, "--json")):
        result, said = run(*command)
        assert result.exception.code in (1, 2)
        assert re.search(message, said.replace('\\"', '"')), said[:2_000]
    edit_config(hostile, quantization_config=published.quantization(published.KIMI_LIST))
    run("lint", hostile)
