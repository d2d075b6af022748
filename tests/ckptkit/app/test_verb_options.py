"""Every option of every verb has an effect beside the others given, or is refused as bad usage with the reason."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ckptkit.app.cli import cli
from ckptkit.app.cli.options import EXCLUDES
from ckptkit.app.cli.verb import needs_of

CONTEXT = click.Context(cli)
VERBS = {name: command for name in cli.list_commands(CONTEXT) if (command := cli.get_command(CONTEXT, name))}
ARGUMENTS = {"explain": [], "doctor": [], "preflight": ["--hf-checkpoint", "x"], "convert": ["x", "y"]} | {
    "quantize": ["x", "y"],
    "diff": ["x", "y"],
}
# Options that have an effect only beside others; every other one has one whatever else is given.
NEEDING = {
    "convert": "group_size grid asymmetric search scale_dtype rounding exact like preset tp readers device ignore",
    "verify": "vpp cp pipeline_layout decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers adapter ranks "
    "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split trainer_loader dp_attention "
    "rollout_temperature megatron_python sglang_python vllm_python",
    "preflight": "ckpt_step",
}


def options_of(verb: str) -> dict[str, click.Option]:
    return {str(one.name): one for one in VERBS[verb].params if isinstance(one, click.Option)}


def words_of(option: click.Option) -> list[str]:
    """The option with a value that it takes."""
    spelled = option.opts[0]
    if option.is_flag:
        return [spelled]
    if isinstance(option.type, click.Choice):
        return [spelled, str(option.type.choices[0])]
    values = {"memory": "1GB", "max_shard_size": "1GB", "ranks": "0,2-3", "reports": "r.json"}
    return [spelled, values.get(str(option.name), "1")]


def parse(verb: str, *words: str) -> str:
    """What a verb says of these words before it does anything; empty where it would begin."""
    try:
        VERBS[verb].make_context(verb, [*ARGUMENTS.get(verb, ["x"]), *words])
    except click.UsageError as error:
        return error.format_message()
    return ""


@pytest.mark.parametrize("verb", VERBS)
def test_options_without_an_effect_alone_are_refused_and_no_others(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = {name: parse(verb, *words_of(option)) for name, option in options_of(verb).items()}
    assert {name for name, text in said.items() if text} == set(NEEDING.get(verb, "").split())
    assert all(f"{options_of(verb)[name].opts[0]}: no effect without " in text for name, text in said.items() if text)


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_accepted_beside_what_it_needs(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = options_of(verb)
    for name, option in options.items():
        words = {name: words_of(option)}
        for _ in range(2):  # what is needed may need another
            for needs, needing in needs_of(VERBS[verb]).items():
                if set(needing) & words.keys() and words.keys().isdisjoint(needs.beside):
                    words[needs.beside[0]] = words_of(options[needs.beside[0]])
        assert parse(verb, *(word for part in words.values() for word in part)) == "", name


@pytest.mark.parametrize("names", [names for names, _ in EXCLUDES], ids=" ".join)
def test_options_that_exclude_each_other_are_refused_together(names: tuple[str, ...]) -> None:
    verbs = [verb for verb in VERBS if options_of(verb).keys() >= {*names}]
    assert verbs
    for verb in verbs:
        words = [word for name in names for word in words_of(options_of(verb)[name])]
        beside = ["--quantize", "w4a16"] if verb == "convert" else []
        assert " exclude each other: " in parse(verb, *words, *beside)


def test_refused_options_exit_with_2_and_say_why() -> None:
    done = CliRunner().invoke(cli, ["convert", "x", "y", "--tp", "4"])
    assert done.exit_code == 2
    assert "needs no parallel sizes, and the output loads at any" in done.output
    assert "convert takes no --pp: it needs no parallel sizes" in parse("convert", "--pp", "2")


@pytest.mark.parametrize("words", [["--strict"], ["--report", "r.json"], ["--tp", "2"], ["--", "--tp", "2"]])
def test_preflight_takes_a_step_beside_a_launch_only(words: list[str]) -> None:
    launch = words[0] == "--"
    said = parse("preflight", "--ckpt-step", "3", *words)
    assert ("no effect without --load or --ref-load or SCRIPT" in said) == (not launch)


@pytest.mark.parametrize("flag", ["-q", "--quiet", "-v", "--verbose", "--debug"])
@pytest.mark.parametrize("verb", VERBS)
def test_flags_that_all_verbs_have_go_before_and_behind_the_verb(verb: str, flag: str) -> None:
    assert parse(verb, flag) == ""
    done = CliRunner().invoke(cli, [flag, verb, "--help"])
    assert (done.exit_code, "--debug" in done.output) == (0, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verfy", "x"], "there is no verb 'verfy': did you mean verify?"),
        (["zzz"], "verbs: convert, diff, doctor, explain, inspect,"),
        (["verify", "x", "--against-megatrn"], "--against-megatron"),
        (["-q", "inspect", "x", "-v"], "--quiet and --verbose exclude each other"),
    ],
)
def test_unknown_words_name_the_nearest(words: list[str], said: str) -> None:
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert said in done.output


SIZES = ("tp", "pp", "ep", "etp", "vpp", "cp", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


@pytest.mark.parametrize("verb", ["verify", "preflight", "quantize"])
@pytest.mark.parametrize("size", [10**6 + 1, 10**30])
def test_a_size_that_no_machine_has_is_bad_usage(verb: str, size: int) -> None:
    given = [option for name, option in options_of(verb).items() if name in SIZES]
    assert given
    for option in given:
        assert f"{size} is not in the range" in parse(verb, option.opts[0], str(size))
