"""Bad input through the real command: one clear message, the right exit code, nothing left behind."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import click
import pytest
from mutations.edits import edit_config
from support import processes
from support.models import tensors

from ckptkit.app.cli import cli
from ckptkit.app.cli.verb import VERBS
from ckptkit.formats.hf.reader import HfCheckpoint


def test_a_model_of_no_family_is_refused_and_nothing_is_left(releases, copy_of, tmp_path, ckptkit):
    source = copy_of(releases("qwen2-tied"))
    edit_config(source, model_type="rwkv9")
    done = ckptkit("convert", source, tmp_path / "out")
    assert done.returncode == 2
    assert "model_type 'rwkv9' is not supported" in done.stderr
    assert "next: " in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["qwen2-tied"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.nightly
@pytest.mark.parametrize("direction", ["to Megatron", "to HF"])
def test_full_file_system_keeps_finished_files(releases, converted, tmp_path, direction):
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", tmp_path]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        source = releases("glm4_moe") if direction == "to Megatron" else converted("glm4_moe")
        done = processes.ckptkit("convert", source, tmp_path / "out")
        assert done.returncode == 2, done.stderr
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr
        finished = [file for kind in ("safetensors", "distcp") for file in tmp_path.glob(f"out.partial/**/*.{kind}")]
        kept = f"keeps {len(finished)} finished file(s)" in done.stderr and "--resume" in done.stderr
        assert kept if finished else list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_dry_run_writes_nothing_and_names_everything(releases, tmp_path, ckptkit):
    done = ckptkit("convert", releases("glm4_moe"), tmp_path / "out", "--dry-run")
    assert done.returncode == 0
    assert "decoder.layers.{2..11}.mlp.experts.experts.{0..11}.linear_fc1.weight" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_inspect_says_format_tensors_and_arguments(releases, converted, ckptkit):
    hf = json.loads(ckptkit("inspect", releases("glm4_moe"), "--json").stdout)
    assert (hf["format"], hf["tensors"], hf["dtypes"]) == ("HF safetensors", 551, {"bfloat16": 541, "float32": 10})
    megatron = json.loads(ckptkit("inspect", converted("glm4_moe"), "--json").stdout)
    assert (megatron["format"], megatron["tensors"], megatron["iteration"]) == ("Megatron torch_dist", 371, "release")
    assert megatron["args"]["num_layers"] == 12
    shapes = {line.partition(" ")[0]: line.partition(" ")[2] for line in hf["names"]}
    assert shapes["model.embed_tokens.weight"].endswith(" bf16")
    assert shapes["model.layers.{2..11}.mlp.gate.e_score_correction_bias"] == "[12] fp32 x10"
    assert hf["parameters"] == sum(math.prod(tensor.shape) for tensor in tensors(releases("glm4_moe")).values())
    shown = ckptkit("inspect", releases("glm4_moe")).stdout
    model = r"glm4_moe, 12 layers, bfloat16 and float32, [\d.]+ MB\n"
    assert re.match(model + r"\d+ files?, 551 tensors, [\d.]+ M parameters\n", shown)
    files = sorted(path.name for path in releases("glm4_moe").glob("*.safetensors"))
    assert re.search(rf"^files: {files[0]} to {files[-1]}, \d+ to \d+ tensors each$", shown, re.M)


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}},
            "rope: rope_parameters.rope_theta=1000000.0, rope_parameters.rope_type=yarn",
        ),
        (
            {"rope_parameters": None, "rope_theta": 500000, "rope_scaling": {"type": "linear", "factor": 8}},
            "rope: rope_theta=500000, rope_scaling.type=linear, rope_scaling.factor=8",
        ),
    ],
)
def test_inspect_shows_rotary_settings_as_they_are_stated(settings, shown, releases, copy_of, ckptkit):
    path = copy_of(releases("qwen2-tied"))
    edit_config(path, **settings)
    assert shown in ckptkit("inspect", path).stdout.splitlines()


def test_no_verb_at_all_shows_the_help(ckptkit):
    bare, asked = ckptkit(), ckptkit("--help")
    assert (bare.returncode, bare.stdout, bare.stderr) == (2, "", asked.stdout)
    assert asked.returncode == 0
    shown = asked.stdout.partition("\nMake:\n")[2]
    assert "..." not in shown
    assert all(f" {row.example}\n" in shown for row in VERBS.values())
    assert re.findall(r"^  (\w+) ", shown, re.M) == [*VERBS]
    assert sorted(re.findall(r"^ +ckptkit (\w+)", shown, re.M)) == sorted(VERBS)


def test_the_example_of_a_verb_is_a_line_that_it_takes(ckptkit):
    for name, row in VERBS.items():
        words = row.example.split()
        command = cli.get_command(click.Context(cli), name)
        with suppress(click.BadParameter):  # a path that is not there
            command.make_context(name, words[2:])
        assert words[:2] == ["ckptkit", name]
        assert ckptkit(name, "--help").stdout.endswith(f"Example:\n  {row.example}\n")


@pytest.mark.parametrize("named", [["vllm"], ["sglang", "slime"]], ids=str)
def test_the_next_command_asks_for_the_readers_that_were_named(named, releases, tmp_path, ckptkit):
    readers = [word for reader in named for word in ("--reader", reader)]
    out, source = str(tmp_path / "out"), str(releases("qwen2-tied"))

    def next_after(*words):
        return ckptkit(*words).stderr.splitlines()[-1]

    words = ["ckptkit", "verify", out, "--source", source, *readers]
    assert next_after("quantize", source, out, "--group-size", "32", *readers) == f"next: {shlex.join(words)}"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    edit_config(tmp_path / "out", quantization_config=config["quantization_config"] | {"ignore": [r"re:lm_head\.w"]})
    if "slime" not in named:
        assert next_after("lint", out, *readers) == f"next: {shlex.join(['ckptkit', 'lint', out, *readers, '--fix'])}"
        after = ["ckptkit", "verify", out, *readers]
        assert next_after("lint", out, *readers, "--fix") == f"next: {shlex.join(after)}"


def test_without_a_terminal_a_run_says_its_time_and_the_next_command_unless_quiet(releases, tmp_path, ckptkit):
    wrote, after = ckptkit("convert", releases("qwen2-tied"), tmp_path / "out").stderr.splitlines()
    assert re.fullmatch(r"wrote \d+\.\d\d MB in \d+\.\d s", wrote)
    assert after == f"next: ckptkit verify {tmp_path / 'out'} --source {releases('qwen2-tied')}"
    assert ckptkit("convert", releases("qwen2-tied"), tmp_path / "out", "--overwrite", "-q").stderr == ""


@pytest.fixture
def inspect_where(ckptkit, monkeypatch, releases):
    """`inspect_where(statement, *options)`: `inspect`, which runs this statement when it opens the checkpoint."""

    def run(statement, *options):
        monkeypatch.setattr(HfCheckpoint, "__init__", lambda *_: exec(statement))  # noqa: S102
        return ckptkit(*options, "inspect", releases("qwen2-tied"))

    return run


def test_an_error_of_the_disk_is_a_message_and_a_traceback_only_with_debug(inspect_where):
    for debug in ([], ["--debug"]):
        done = inspect_where("raise OSError(5, 'Input/output error', 'x.safetensors')", *debug)
        assert done.returncode == 2
        assert "Input/output error: 'x.safetensors'" in done.stderr
        assert ("Traceback" in done.stderr) == bool(debug)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("import no_such_library.core", f"error: no_such_library is not installed in {sys.executable}\n  next: "),
        ("raise ImportError('libcudart.so.12: not found', name='torch._C')", "error: torch cannot be used: libcudart"),
        ("import ckptkit.no_such_module", "error: an error inside ckptkit: ModuleNotFoundError"),
        ("import numpy; numpy.zeros(1 << 46)", "error: this command needs more memory than is available\n  next: run"),
        ("import torch; torch.zeros(1 << 46)", "error: this command needs more memory than is available"),
    ],
)
def test_a_library_that_is_missing_or_cannot_be_loaded_is_no_error_of_ckptkit(inspect_where, statement, words):
    done = inspect_where(statement)
    assert (done.returncode, done.stderr[: len(words)]) == (2, words)


def test_head_ends_a_run_quietly_with_the_exit_code_of_the_verb(releases, copy_of):
    broken = copy_of(releases("qwen3_moe"))
    next(broken.glob("*.safetensors")).unlink()
    for words, code in ((["verify", broken, "-q"], 1), (["inspect", releases("qwen3_moe"), "-q"], 0)):
        end, gone = os.pipe()
        os.close(end)
        program = [sys.executable, "-m", "ckptkit", *map(str, words)]
        done = subprocess.run(program, stdout=gone, stderr=subprocess.PIPE, check=False)
        os.close(gone)
        assert (done.returncode, done.stderr) == (code, b""), words


def test_lines_into_a_pipe_are_whole(tmp_path):
    log = Path(__file__).parents[2] / "verify/triage/logs/symptoms.txt"
    program = [sys.executable, "-m", "ckptkit", "triage", str(log)]
    without = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    longest = {}
    for columns in ({}, {"COLUMNS": "80"}):
        done = subprocess.run(program, capture_output=True, text=True, check=False, env=without | columns)
        means = [line for line in done.stdout.splitlines() if line.startswith("  meaning")]
        longest[len(columns)] = max(map(len, means))
        assert "…" not in done.stdout or columns
    assert longest[0] > 120 > 80 >= longest[1]
