"""`preflight --ask-trainer`: a stub of slime, whose two parsers each take a part of the words, parses the launch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import verify.launch.ask_trainer
from ckptkit.app.cli import cli
from ckptkit.core.errors import UsageError
from verify.launch.preflight import preflight
from verify.launch.words import LaunchText, Word
from verify.report import Finding, Report

STUB = """
import argparse, os, sys
{imports}

def parse_args():
    print("the stub prints this, and {{}} too")
    engine = argparse.ArgumentParser(add_help=False)
    engine.add_argument("--sglang-mem-fraction", type=float)
    engine.parse_known_args()
    small = argparse.ArgumentParser(add_help=False)
    small.parse_known_args(["--only", "these"])
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("actor-num-nodes", "actor-num-gpus-per-node", "tensor-model-parallel-size", "rotary-base"):
        parser.add_argument(f"--{{name}}", type=int, default=1)
    for name in ("hf-checkpoint", "wandb-key", "eval-config"):
        parser.add_argument(f"--{{name}}")
    args, _ = parser.parse_known_args()
    {validation}
    return args
"""
RIGHT = "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 --sglang-mem-fraction 0.8"
WORLD = "assert int(os.environ['WORLD_SIZE']) % args.tensor_model_parallel_size == 0, 'tensor_model_parallel_size'"


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., Report]:
    """Writes a checkout of the stub and a launch that starts its train.py, and has that parse the launch."""

    def ask(words: str, validation: str = WORLD, imports: str = "", setting: str = "") -> Report:
        arguments = tmp_path / "slime" / "utils" / "arguments.py"
        arguments.parent.mkdir(parents=True, exist_ok=True)
        arguments.write_text(STUB.format(validation=validation, imports=imports))
        script = tmp_path / "run.sh"
        script.write_text(f"cd {tmp_path}\n{setting}\npython3 train.py --hf-checkpoint {tmp_path}/hf \\\n  {words}\n")
        return preflight(script=script, ask_trainer=sys.executable)

    return ask


def refused(report: Report) -> list[Finding]:
    return [one for one in report.findings if one.code == "CK746"]


def reasons(report: Report) -> list[str]:
    return [one for one in report.reasons if one.startswith("the trainer")]


def test_what_each_of_two_parsers_takes_is_taken(asked: Callable[..., Report]) -> None:
    report = asked(RIGHT)
    assert (refused(report), reasons(report)) == ([], [])
    (note,) = [one for one in report.facts["notes"] if "executed the code of slime" in one]
    assert "compute capability 9.0" in note


def test_what_no_parser_takes_is_a_warning_at_its_line(asked: Callable[..., Report], tmp_path: Path) -> None:
    (found,) = refused(asked(f"{RIGHT} --sglang-mem-fractoin 0.8 \\\n --rotary-base 5"))
    assert (found.severity, found.file) == ("warning", str(tmp_path / "run.sh"))
    assert found.actual.startswith("--sglang-mem-fractoin, ")
    assert found.actual.endswith("run.sh:4")


def test_a_world_that_does_not_divide_is_refused_in_the_trainers_words(
    asked: Callable[..., Report], tmp_path: Path
) -> None:
    words = RIGHT.replace("-size 2", "-size 3")
    (error, warning) = refused(asked(f"{words} --rotary-bse 4"))
    assert (error.severity, warning.severity) == ("error", "warning")
    assert error.actual == f"tensor_model_parallel_size (--tensor-model-parallel-size at {tmp_path}/run.sh:4)"
    assert f"{tmp_path}/slime/utils/arguments.py:" in error.hint


def test_a_list_of_refusals_is_an_error_each(asked: Callable[..., Report]) -> None:
    validation = "raise AssertionError('hf_validate_args failed: a is not equal to rotary_base 7.; hidden_size b')"
    first, second = refused(asked(f"{RIGHT} --rotary-base 7", validation))
    assert first.actual.startswith("a is not equal to rotary_base 7 (--rotary-base at ")
    assert second.actual == "hidden_size b"


def test_a_word_that_argparse_refuses_hides_what_later_parsers_take(asked: Callable[..., Report]) -> None:
    for words in (RIGHT.replace("0.8", "much"), f"{RIGHT} --rotary-base much"):
        (found,) = [one for one in refused(asked(words)) if one.hint.startswith("change what the message names")]
        assert found.severity == "error"
        assert "invalid" in found.actual
        assert "run.sh:" in found.actual


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        ("assert args.rotary_base != 1", "it stops at `assert args.rotary_base != 1`"),
        ("raise SystemExit('no such mode')", "no such mode"),
        ("raise ValueError('rotary')", "rotary"),
        ("open('/nowhere/eval.yaml')", "[Errno 2] No such file or directory: '/nowhere/eval.yaml'"),
    ],
)
def test_what_the_trainer_raises_is_its_refusal(validation: str, message: str, asked: Callable[..., Report]) -> None:
    (found,) = refused(asked(RIGHT, validation))
    assert (found.severity, found.actual) == ("error", message)


@pytest.mark.parametrize(
    ("validation", "imports", "says"),
    [
        ("", "import not_a_package_that_is_there", "ModuleNotFoundError"),
        ("", "assert False, 'while importing'", "while importing the trainer"),
        ("import slime.utils.lazy", "", "lazy"),
        ("args.nothing", "", "AttributeError"),
        ("assert False, 'Transformer Engine version 2 is needed'", "", "version 2"),
        ("os._exit(0)", "", "it ended by itself"),
    ],
)
def test_what_is_no_refusal_is_inconclusive(
    validation: str, imports: str, says: str, asked: Callable[..., Report]
) -> None:
    report = asked(RIGHT, validation or WORLD, imports)
    (reason,) = reasons(report)
    assert refused(report) == []
    assert "gave no answer" in reason
    assert says in reason


def test_code_of_a_checkpoint_does_not_run(asked: Callable[..., Report], tmp_path: Path) -> None:
    home = tmp_path / "hf"
    home.mkdir()
    (home / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "code.Own"}}')
    (home / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    loads = "AutoConfig.from_pretrained(args.hf_checkpoint, trust_remote_code=True)"
    (reason,) = reasons(asked(RIGHT, loads, "from transformers import AutoConfig"))
    assert "code of its own, which is not run" in reason
    assert not (tmp_path / "ran").exists()


def test_a_trainer_that_hangs_is_ended(asked: Callable[..., Report], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify.launch.ask_trainer, "_LIMIT_S", 6.0)
    (reason,) = reasons(asked(RIGHT, "import time; time.sleep(600)"))
    assert "did not end within 6 s" in reason


def test_a_process_that_the_trainer_forks_reports_nothing(asked: Callable[..., Report]) -> None:
    forks = "pid = os.fork()\n    if not pid: raise ValueError('in the child')\n    os.waitpid(pid, 0)"
    report = asked(RIGHT, forks)
    assert (refused(report), reasons(report)) == ([], [])


def test_unknown_words_are_not_asked_about_and_secrets_are_not_passed_on(
    asked: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    (reason,) = reasons(asked(f"{RIGHT} --rotary-base $BASE"))
    assert "was not asked" in reason
    assert "$BASE" in reason
    monkeypatch.setenv("WANDB_KEY", "a value to hide")
    leaks = "assert args.wandb_key == 'hidden' and 'a value' not in str(dict(os.environ)), 'leaked'"
    leaks += "; assert os.environ['MODE'] == 'public' and os.environ['HF_HUB_OFFLINE'] == '1', 'lost'"
    report = asked(f"{RIGHT} --wandb-key $WANDB_KEY", leaks, setting="export MODE=public HF_HUB_OFFLINE=0 WANDB_KEY")
    assert (refused(report), reasons(report)) == ([], [])


def test_a_launch_without_a_trainer_says_what_to_do(tmp_path: Path) -> None:
    words = tuple(map(Word, ["--hf-checkpoint", str(tmp_path), *RIGHT.split()]))
    text = LaunchText(words, program="train.py", directory=tmp_path)
    (reason,) = reasons(preflight(text=text, ask_trainer=sys.executable))
    assert "slime.utils.arguments or miles.utils.arguments was not found" in reason
    megatron = LaunchText(words[:2], program="pretrain_gpt.py", directory=tmp_path)
    (reason,) = reasons(preflight(text=megatron, ask_trainer=sys.executable))
    assert "number of processes is not known" in reason
    with pytest.raises(UsageError):
        preflight(text=text, ask_trainer=tmp_path / "python")


def test_the_option_takes_a_python_or_none(asked: Callable[..., Report], tmp_path: Path) -> None:
    asked(RIGHT.replace("-size 2", "-size 3"))
    for words in (["--ask-trainer"], ["--ask-trainer", sys.executable]):
        done = CliRunner().invoke(cli, ["preflight", str(tmp_path / "run.sh"), *words])
        assert (done.exit_code, "tensor_model_parallel_size (" in done.output) == (1, True), done.output
