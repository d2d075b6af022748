"""Every option of every verb has an effect beside the others given, or is refused as bad usage with the reason."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ckptkit.app.cli import cli
from ckptkit.app.cli.effects import RULES, Excludes, Needs

CONTEXT = click.Context(cli)
VERBS = {name: command for name in cli.list_commands(CONTEXT) if (command := cli.get_command(CONTEXT, name))}
ARGUMENTS = {"explain": [], "doctor": [], "preflight": ["--hf-checkpoint", "x"], "convert": ["x", "y"]} | {
    "quantize": ["x", "y"],
    "diff": ["x", "y"],
}
# Each of these has an effect whatever else is given, as its help says.
ALWAYS = {
    "convert": "unwitnessed workers memory max_shard_size file_bytes ray resume overwrite dry_run as_json",
    "quantize": "scheme rounding exact group_size grid asymmetric search scale_dtype like preset tp readers device "
    "ignore workers memory max_shard_size file_bytes ray resume overwrite dry_run as_json",
    "inspect": "as_args as_json",
    "lint": "readers fix strict as_json",
    "manifest": "output workers",
    "verify": "source against_megatron against_sglang against_vllm engine update release_resume logits rollout_data "
    "manifest tp pp ep etp readers ray every reports strict as_json",
    "preflight": "every hf_checkpoint load ref_load tp pp ep reports strict as_json",
    "diff": "exact as_json",
    "triage": "as_json",
    "explain": "",
    "doctor": "megatron_python sglang_python vllm_python as_json",
}
GLOBAL = {"quiet", "verbose", "debug"}


def options_of(verb: str) -> dict[str, click.Option]:
    return {str(one.name): one for one in VERBS[verb].params if isinstance(one, click.Option)}


def words_of(option: click.Option) -> list[str]:
    """The option with a value that it takes."""
    spelled = option.opts[0]
    if option.is_flag:
        return [spelled]
    if isinstance(option.type, click.Choice):
        return [spelled, str(option.type.choices[0])]
    values = {"memory": "1GB", "max_shard_size": "1GB", "file_bytes": "1GB", "ranks": "0,2-3", "reports": "r.json"}
    return [spelled, values.get(str(option.name), "1")]


def parse(verb: str, *words: str) -> str:
    """What a verb says of these words before it does anything; empty where it would begin."""
    try:
        VERBS[verb].make_context(verb, [*ARGUMENTS.get(verb, ["x"]), *words])
    except click.UsageError as error:
        return error.format_message()
    return ""


# Options whose effect hangs on what lies at the paths: the run refuses them once it has looked.
OF_CONTENT = {
    "convert": frozenset({"hf", "dialect", "quantization", "merge", "dtype"}),
    "diff": frozenset({"hf"}),
    "inspect": frozenset({"hf"}),
    "manifest": frozenset({"hf"}),
    "verify": frozenset({"hf"}),
}
NEEDS = [
    pytest.param(verb, option, rule, id=f"{verb} {option}")
    for verb, rules in RULES.items()
    for rule in rules
    if isinstance(rule, Needs)
    for option in rule.options
]
EXCLUDES = [
    pytest.param(verb, rule, id=f"{verb} {' '.join(rule.options)}")
    for verb, rules in RULES.items()
    for rule in rules
    if isinstance(rule, Excludes)
]


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_said_to_have_an_effect_always_or_beside_others(verb: str) -> None:
    needing = {name for rule in RULES[verb] if isinstance(rule, Needs) for name in rule.options}
    always = set(ALWAYS[verb].split())
    of_content = OF_CONTENT.get(verb, frozenset())
    assert always.isdisjoint(needing | of_content)
    assert always | needing | of_content | GLOBAL == set(options_of(verb))


@pytest.mark.parametrize(("verb", "option", "rule"), NEEDS)
def test_an_option_alone_is_refused_with_what_it_needs(verb: str, option: str, rule: Needs) -> None:
    words = words_of(options_of(verb)[option])
    said = parse(verb, *words)
    assert f"{words[0]}: no effect without " in said
    assert any(said.endswith(one.hint) for one in RULES[verb] if isinstance(one, Needs) and option in one.options)


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_accepted_beside_what_it_needs(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = options_of(verb)
    for name, option in options.items():
        words = {name: words_of(option)}
        for _ in range(2):  # what is needed may need another
            for rule in RULES[verb]:
                beside = rule.beside if isinstance(rule, Needs) and set(rule.options) & words.keys() else ()
                if beside and words.keys().isdisjoint(beside):
                    words[beside[0]] = words_of(options[beside[0]])
        assert parse(verb, *(word for part in words.values() for word in part)) == "", name


@pytest.mark.parametrize(("verb", "rule"), EXCLUDES)
def test_options_that_exclude_each_other_are_refused_together(
    verb: str, rule: Excludes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = options_of(verb)
    words = [word for name in rule.options if name in own for word in words_of(own[name])]
    beside = ["--quantize", "w4a16"] if verb == "convert" else []
    assert rule.hint in parse(verb, *words, *beside)


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
