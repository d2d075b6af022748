"""The functions of `ckptkit` as a user calls them: help, a wrong argument, and what `print` shows of a result."""

import inspect
import pydoc
from pathlib import Path

import pytest
from click.testing import CliRunner

import ckptkit
from ckptkit.app.cli import cli
from ckptkit.core.errors import UsageError

LOG = Path(__file__).parents[2] / "verify/triage/logs/symptoms.txt"
FUNCTIONS = ("convert", "diff", "inspect", "lint", "make_manifest", "open", "preflight", "quantize", "triage", "verify")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_argument_is_refused_with_the_name_of_the_function(name):
    function = getattr(ckptkit, name)
    named = next(one for one in reversed(inspect.signature(function).parameters) if len(one) > 1)
    with pytest.raises(TypeError, match=rf"ckptkit\.{name}\(\).*{named}_x'.*'{named}'"):
        function(**{f"{named}_x": 1})
    with pytest.raises(TypeError, match=rf"ckptkit\.{name}\(\)"):
        function(1.5, *[] if name != "convert" else ["out"])


@pytest.mark.parametrize("name", ["convert", "preflight", "quantize", "verify"])
def test_help_lists_every_option(name):
    text = pydoc.plain(pydoc.render_doc(getattr(ckptkit, name)))
    options = list(inspect.signature(getattr(ckptkit, name)).parameters)
    assert len(options) > 8
    assert [option for option in options if f"{option}: " not in text] == []


@pytest.mark.parametrize("call", [{"tp": "2"}, {"trained": 1}, {"readers": 7}])
def test_a_value_of_another_type_is_refused(call):
    with pytest.raises(TypeError, match=next(iter(call))):
        ckptkit.verify("x", **call)


def test_a_parallel_size_is_at_least_one():
    with pytest.raises(UsageError, match="parallel"):
        ckptkit.verify("x", tp=0)


def test_one_value_is_enough_where_several_are_taken(releases):
    assert ckptkit.triage(LOG).logs == [str(LOG)]
    assert ckptkit.verify(releases("qwen2-tied"), against="transformers", accept="ck506").status == "passed"


def test_preflight_takes_the_launch_first(releases, tmp_path):
    (tmp_path / "run.sh").write_text(f"python3 train.py --hf-checkpoint {releases('qwen2-tied')}\n")
    assert ckptkit.preflight(str(tmp_path / "run.sh")).checkpoint == str(releases("qwen2-tied"))
    assert ckptkit.preflight(arguments=f"--hf-checkpoint {releases('qwen2-tied')}").status == "passed"
    for wrong in (tmp_path, tmp_path / "absent.sh"):
        with pytest.raises(UsageError, match=str(wrong)):
            ckptkit.preflight(wrong)


def test_a_scheme_may_be_given_by_name(releases, tmp_path):
    source = releases("qwen3_moe")
    result = ckptkit.quantize(source, tmp_path / "fp8", "fp8-channel", dry_run=True)
    assert result.packed.scheme.startswith("fp8-channel ")
    for options in ({"scheme": "w4"}, {"device": "gpu"}, {"preset": "sft"}, {"workers": 0}):
        with pytest.raises(UsageError, match=str(next(iter(options.values())))):
            ckptkit.quantize(source, tmp_path / "out", **options)


def test_a_printed_result_is_the_text_of_the_command_line(releases, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    paths = [str(releases("qwen2-tied")), str(releases("qwen2-untied"))]
    results = {
        ("verify", *paths[:1]): ckptkit.verify(paths[0]),
        ("preflight", "--hf-checkpoint", *paths[:1]): ckptkit.preflight(hf_checkpoint=paths[0]),
        ("diff", *paths): ckptkit.diff(*paths),
        ("triage", str(LOG)): ckptkit.triage(LOG),
    }
    for words, result in results.items():
        assert CliRunner().invoke(cli, [*words, "-q"]).stdout == f"{result}\n", words
    report = ckptkit.verify(paths[0], paths[1])
    first = str(report.findings[0]).splitlines()
    assert first[0].startswith(f"{report.findings[0].code} error: ")
    assert first[1:] == [line for line in str(report).splitlines() if line in first[1:]][: len(first) - 1]
