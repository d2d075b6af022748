"""Every option has an effect beside the others given, or is refused with the reason; what a shell offers at TAB."""

import subprocess
from itertools import product
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner
from support.messages import refusal, text_with

from ckptkit.app import api
from ckptkit.app.api import convert
from ckptkit.app.cli import cli
from ckptkit.app.cli.verb import needs_of
from ckptkit.app.option import EXCLUDES
from ckptkit.app.run_options import run_options
from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.verify.run import verify

CONTEXT = click.Context(cli)
VERBS = {name: command for name in cli.list_commands(CONTEXT) if (command := cli.get_command(CONTEXT, name))}
ARGUMENTS = {"explain": [], "doctor": [], "gate": [], "preflight": ["--hf-checkpoint", "x"], "convert": ["x", "y"]} | {
    "quantize": ["x", "y"],
    "diff": ["x", "y"],
}
# Options that have an effect only beside others; every other one has one whatever else is given.
NEEDING = {
    "convert": "group_size grid asymmetric search scale_dtype rounding exact like preset tp readers device ignore",
    "verify": "vpp cp pipeline_layout decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers adapter "
    "trained ranks account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split trainer_loader "
    "dp_attention rollout_temperature megatron_python sglang_python vllm_python",
    "preflight": "ckpt_step",
}


def options_of(verb):
    return {str(one.name): one for one in VERBS[verb].params if isinstance(one, click.Option)}


def words_of(option):
    spelled = option.opts[0]
    if option.is_flag:
        return [spelled]
    if isinstance(option.type, click.Choice):
        return [spelled, str(option.type.choices[0])]
    values = {"memory": "1GB", "max_shard_size": "1GB", "ranks": "0,2-3", "reports": "r.json"}
    return [spelled, values.get(str(option.name), "1")]


def parse(verb, *words):
    """What a verb says of these words before it does anything; empty where it would begin."""
    try:
        VERBS[verb].make_context(verb, [*ARGUMENTS.get(verb, ["x"]), *words])
    except click.UsageError as error:
        return error.format_message()
    return ""


@pytest.mark.parametrize("verb", VERBS)
def test_options_without_an_effect_alone_are_refused_and_no_others(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = options_of(verb)
    said = {name: parse(verb, *words_of(option)) for name, option in options.items()}
    assert {name for name, text in said.items() if text} == set(NEEDING.get(verb, "").split())
    assert all(f"{options[name].opts[0]}: no effect without " in text for name, text in said.items() if text)
    for name, option in options.items():
        words = {name: words_of(option)}
        for _ in range(2):  # what is needed may need another
            for needs, needing in needs_of(VERBS[verb]).items():
                if set(needing) & words.keys() and words.keys().isdisjoint(needs.any_of):
                    words[needs.any_of[0]] = words_of(options[needs.any_of[0]])
        assert parse(verb, *(word for part in words.values() for word in part)) == "", name


def test_options_that_exclude_each_other_are_refused_together():
    for names, _ in EXCLUDES:
        verbs = [verb for verb in VERBS if options_of(verb).keys() >= {*names}]
        assert verbs
        for verb in verbs:
            words = [word for name in names for word in words_of(options_of(verb)[name])]
            beside = ["--quantize", "w4a16"] if verb == "convert" else []
            assert " exclude each other: " in parse(verb, *words, *beside), names


def test_python_refuses_what_the_command_line_refuses():
    for given in ({"overwrite": True, "resume": True}, {"like": "c", "preset": "rl"}):
        with pytest.raises(UsageError, match="exclude each other|quantized weights"):
            run_options("convert", "a", "b", **given)
    with pytest.raises(TypeError, match="overwite"):
        run_options("convert", "a", "b", overwite=True)
    assert run_options("convert", "a", "b", max_shard_size="5GB").max_shard_size == 5 * 10**9


def test_preflight_takes_a_step_beside_a_launch_only():
    for words in (["--strict"], ["--report", "r.json"], ["--tp", "2"]):
        assert "no effect without --load or --ref-load or SCRIPT" in parse("preflight", "--ckpt-step", "3", *words)
    assert "no effect" not in parse("preflight", "--ckpt-step", "3", "--", "--tp", "2")


@pytest.mark.parametrize("verb", VERBS)
def test_flags_that_all_verbs_have_go_before_and_behind_the_verb(verb):
    for flag in ("-q", "--quiet", "-v", "--verbose", "--debug"):
        assert parse(verb, flag) == ""
        done = CliRunner().invoke(cli, [flag, verb, "--help"])
        assert (done.exit_code, "--debug" in done.output) == (0, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("verfy x", "verb"),
        ("zzz", "verbs: convert, diff, doctor, explain, gate, inspect,"),
        ("verify x --against-megatrn", "--against-megatron"),
        ("-q inspect x -v", "--quiet and --verbose exclude each other"),
        ("convert x y --tp 4", "parallel"),
        ("convert --pp 2", "--pp"),
    ],
)
def test_bad_usage_exits_with_2_and_names_the_nearest(words, said):
    done = CliRunner().invoke(cli, words.split())
    assert done.exit_code == 2
    assert done.output == text_with(said)


SIZES = ("tp", "pp", "ep", "etp", "vpp", "cp", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


@pytest.mark.parametrize("verb", ["verify", "preflight", "quantize"])
def test_a_size_that_no_machine_has_is_bad_usage(verb):
    given = [option for name, option in options_of(verb).items() if name in SIZES]
    assert given
    for option, size in product(given, (10**6 + 1, 10**30)):
        assert f"{size} is not in" in parse(verb, option.opts[0], str(size))


def run(*arguments):
    return CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False).output


@pytest.mark.parametrize("direction", ["to Megatron", "to HF"])
def test_int4_argument_without_a_scheme_is_refused(direction, releases, converted, tmp_path):
    source = (releases if direction == "to Megatron" else converted)("qwen2-tied")
    given = {"like": "absent", "tp": 4, "readers": ("sglang",), "device": "cuda"}
    for name, value in given.items():
        refusal(f"^--{name.removesuffix('s')}", convert, source, tmp_path / "out", **{name: value})
    assert list(tmp_path.iterdir()) == []


def test_quantizing_into_or_from_megatron_names_the_command_with_the_scheme_that_was_asked_for(
    releases, converted, tmp_path
):
    for verb, source, option in (("convert", releases, "--quantize"), ("quantize", converted, "--scheme")):
        error = refusal("", run, verb, source("qwen2-tied"), tmp_path / "out", option, "fp8-block")
        other = "`ckptkit quantize SRC DST --scheme" if verb == "convert" else "`ckptkit convert SRC DST --quantize"
        assert f"{other} fp8-block`" in (error.hint or "")


def test_dialect_on_the_way_to_quantized_hf_is_refused(converted, tmp_path):
    with pytest.raises(CkptkitError, match="--dialect.*Megatron.*INT4"):
        run("convert", converted("qwen2-tied"), tmp_path / "out", "--dialect", "mcore", "--quantize", "w4a16")


def test_hf_where_nothing_is_megatron_is_refused(releases, tmp_path):
    model = releases("qwen2-tied")
    for call in (
        lambda: convert(model, tmp_path / "out", hf=model),
        lambda: api.inspect(model, hf=model),
        lambda: api.model_arguments(model, hf=model),
        lambda: api.make_manifest(model, tmp_path / "out.json", hf=model),
        lambda: verify(model, hf=model),
        lambda: verify(model, source=model, hf=model),
    ):
        refusal("^--hf ", call)
    assert list(tmp_path.iterdir()) == []


def test_dtype_and_shard_size_beside_quantize_have_an_effect(converted, tmp_path):
    words = ["--quantize", "w4a16", "--group-size", "32"]
    run("convert", converted("qwen2-tied"), tmp_path / "plain", *words)
    run("convert", converted("qwen2-tied"), tmp_path / "other", *words, "--dtype", "float16", "--max-shard-size", "1MB")
    dtypes = [set(api.inspect(tmp_path / name)["dtypes"]) for name in ("plain", "other")]
    assert dtypes == [{"bfloat16", "int32", "int64"}, {"float16", "int32", "int64"}]
    files = [len(list((tmp_path / name).glob("*.safetensors"))) for name in ("plain", "other")]
    assert files[0] != files[1]


VARIABLE = "_CKPTKIT_COMPLETE"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ver"], [("plain", "verify")]),
        (["verify", "--against"], [("plain", "--against-megatron"), ("plain", "--against-sglang")]),
        (["convert", "a", "b", "--dialect", ""], [("plain", "mcore"), ("plain", "slime"), ("plain", "hybrid")]),
        (["convert", "qwen"], [("file", "qwen")]),
        (["preflight", "run"], [("file", "run")]),
        (["absent", "--"], [("plain", "--version"), ("plain", "--quiet"), ("plain", "--verbose")]),
        # --quantize, without which --group-size is refused
        (["convert", "a", "b", "--group-size", "32", "--qu"], [("plain", "--quantize"), ("plain", "--quiet")]),
    ],
)
def test_verb_option_value_or_file_is_completed(words, expected):
    completion = BashComplete(cli, {}, "ckptkit", VARIABLE)
    offered = [(one.type, one.value) for one in completion.get_completions(words[:-1], words[-1])]
    assert offered[: len(expected)] == expected


def test_bash_takes_the_script_that_the_page_has_it_read():
    page = Path(__file__).resolve().parents[3] / "docs/index.md"
    assert f'eval "$({VARIABLE}=bash_source ckptkit)"' in page.read_text()
    script = BashComplete(cli, {}, "ckptkit", VARIABLE).source()
    said = subprocess.run(["bash", "-c", f"{script}\ncomplete -p ckptkit"], capture_output=True, text=True, check=True)
    assert said.stdout == "complete -o nosort -F _ckptkit_completion ckptkit\n"
