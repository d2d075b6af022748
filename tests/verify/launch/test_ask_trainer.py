"""`preflight --ask-trainer`: a stub of slime, whose two parsers each take a part of the words, parses the launch."""

import sys

import pytest
from click.testing import CliRunner
from support.messages import text_with

import ckptkit.verify.launch.ask_trainer
from ckptkit.app.cli import cli
from ckptkit.core.errors import UsageError
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.launch.words import LaunchText, Word

STUB = """
import argparse, os, sys
{imports}

def parse_args():
    print("the stub prints this, and {{}} too")
    engine = argparse.ArgumentParser(add_help=False)
    engine.add_argument("--sglang-mem-fraction", type=float)
    engine.parse_known_args()
    argparse.ArgumentParser(add_help=False).parse_known_args(["--only", "these"])
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("actor-num-nodes", "actor-num-gpus-per-node", "tensor-model-parallel-size", "rotary-base"):
        parser.add_argument(f"--{{name}}", type=int, default=1)
    for name in ("hf-checkpoint", "wandb-key"):
        parser.add_argument(f"--{{name}}")
    args, _ = parser.parse_known_args()
    {validation}
    return args
"""
RIGHT = "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 --sglang-mem-fraction 0.8"
WORLD = "assert args.actor_num_gpus_per_node % args.tensor_model_parallel_size == 0, 'tensor_model_parallel_size'"


@pytest.fixture
def asked(tmp_path):
    def ask(words, validation=WORLD, imports="", setting=""):
        arguments = tmp_path / "slime" / "utils" / "arguments.py"
        arguments.parent.mkdir(parents=True, exist_ok=True)
        arguments.write_text(STUB.format(validation=validation, imports=imports))
        script = tmp_path / "run.sh"
        script.write_text(f"cd {tmp_path}\n{setting}\npython3 train.py --hf-checkpoint {tmp_path}/hf \\\n  {words}\n")
        return preflight(script=script, ask_trainer=sys.executable)

    return ask


def refused(report):
    return [one for one in report.findings if one.code == "CK746"]


def reasons(report):
    return [one for one in report.reasons if one.startswith("the trainer")]


# In a process that the trainer forks, which reports nothing.
FORKED = "pid = os.fork()\n    if not pid: raise ValueError('in the child')\n    os.waitpid(pid, 0)"


@pytest.mark.parametrize("validation", [WORLD, FORKED])
def test_what_each_of_two_parsers_takes_is_taken(validation, asked):
    report = asked(RIGHT, validation)
    assert (refused(report), reasons(report)) == ([], [])
    assert any("executed" in one for one in report.facts["notes"])


@pytest.mark.parametrize("options", [["--ask-trainer"], ["--ask-trainer", sys.executable]])
def test_refusal_and_untaken_word_are_named_at_their_lines(options, asked, tmp_path):
    error, warning = refused(asked(f"{RIGHT.replace('-size 2', '-size 3')} \\\n --sglang-mem-fractoin 0.8"))
    assert (error.severity, error.file) == ("error", str(tmp_path / "run.sh"))
    assert error.actual == f"tensor_model_parallel_size (--tensor-model-parallel-size at {tmp_path}/run.sh:4)"
    assert f"{tmp_path}/slime/utils/arguments.py:" in error.hint
    assert (warning.severity, "--sglang-mem-fractoin" in warning.actual) == ("warning", True)
    assert "run.sh:5" in warning.actual
    done = CliRunner().invoke(cli, ["preflight", str(tmp_path / "run.sh"), *options])
    assert (done.exit_code, "tensor_model_parallel_size (" in done.output) == (1, True)


@pytest.mark.parametrize(
    ("words", "validation", "messages"),
    [
        ("", "assert args.rotary_base != 1", ["it stops at `assert args.rotary_base != 1`"]),
        ("", "raise SystemExit('no such mode')", ["no such mode"]),
        ("", "raise ValueError('validate failed: a is not b; hidden c')", ["a is not b", "hidden c"]),
        # Where a parser stops, words of the next one are not called untaken.
        ("--rotary-base 2", "raise ValueError('big_rotary_base')", ["big_rotary_base"]),
        ("--sglang-mem-fraction much", "", ["argument --sglang-mem-fraction: invalid float value: 'much' (--sglang-m"]),
    ],
)
def test_what_the_trainer_raises_is_its_refusal(words, validation, messages, asked):
    found = refused(asked(f"{RIGHT} {words}", validation))
    assert [one.severity for one in found] == ["error"] * len(messages)
    assert all(one.actual.startswith(text) for one, text in zip(found, messages, strict=True))


@pytest.mark.parametrize(
    ("validation", "imports", "says"),
    [
        (WORLD, "import not_a_package_that_is_there", "ModuleNotFoundError"),
        (WORLD, "assert False, 'while importing'", "while importing the trainer"),
        ("args.nothing", "", "AttributeError"),
        ("assert False, 'Transformer Engine version 2 is needed'", "", "version 2"),
        ("os._exit(0)", "", "no report"),
        ("import time; time.sleep(600)", "", "within 10 s"),
    ],
)
def test_what_is_no_refusal_is_inconclusive(validation, imports, says, asked, monkeypatch):
    monkeypatch.setattr(ckptkit.verify.launch.ask_trainer, "_LIMIT_S", 10.0)
    report = asked(RIGHT, validation, imports)
    assert (refused(report), reasons(report)) == ([], [text_with(says)])


def test_code_of_a_checkpoint_does_not_run(asked, tmp_path):
    home = tmp_path / "hf"
    home.mkdir()
    (home / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "code.Own"}}')
    (home / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    loads = "AutoConfig.from_pretrained(args.hf_checkpoint, trust_remote_code=True)"
    (reason,) = reasons(asked(RIGHT, loads, "from transformers import AutoConfig"))
    assert "code" in reason
    assert not (tmp_path / "ran").exists()


def test_unknown_words_are_not_asked_about_and_secrets_are_not_passed_on(asked, monkeypatch):
    (reason,) = reasons(asked(f"{RIGHT} --rotary-base $BASE"))
    assert "$BASE" in reason
    monkeypatch.setenv("WANDB_KEY", "a value to hide")
    leaks = "assert args.wandb_key == 'hidden' and 'a value' not in str(dict(os.environ)), 'leaked'"
    leaks += "; assert os.environ['MODE'] == 'public' and os.environ['HF_HUB_OFFLINE'] == '1', 'lost'"
    report = asked(f"{RIGHT} --wandb-key $WANDB_KEY", leaks, setting="export MODE=public HF_HUB_OFFLINE=0 WANDB_KEY")
    assert (refused(report), reasons(report)) == ([], [])


BEGINS = "raise RuntimeError('the job began')"
VERL = """
import os, sys, omegaconf, ray
values = dict(word.lstrip("+").split("=", 1) for word in sys.argv[1:])
assert values.pop("hydra.output_subdir") == "null" and os.path.isdir(values.pop("hydra.run.dir").strip("'"))
def main():
    {body}
    ray.init()
if __name__ == "__main__":
    main()
"""


@pytest.fixture
def ran(tmp_path):
    def run(*words, body="pass", program="-m verl.trainer.main_ppo"):
        write(tmp_path, {"verl/__init__.py": "", "verl/trainer/main_ppo.py": VERL.format(body=body)})
        write(tmp_path, {"ray.py": f"def init(): {BEGINS}", "omegaconf.py": "class ConfigError(Exception): pass"})
        lines = " \\\n".join([f"actor_rollout_ref.model.path={tmp_path}", "data.train_batch_size=8", *words])
        (tmp_path / "run.sh").write_text(f"cd {tmp_path}\npython3 {program} {lines}\n")
        return preflight(script=tmp_path / "run.sh", ask_trainer=sys.executable)

    return run


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_a_program_is_run_until_it_begins_its_job(ran, tmp_path):
    name = "trainer.experiment_name"
    report = ran(f"{name}=run_$(date +%H%M)", body=f"assert values['{name}'] == 'hidden'")
    assert (refused(report), reasons(report)) == ([], [])
    # Another program is not run.
    write(tmp_path, {"recipe/main_dapo.py": f"open({str(tmp_path / 'ran')!r}, 'w')"})
    (reason,) = reasons(ran(program="-m recipe.main_dapo"))
    assert ("recipe.main_dapo" in reason, (tmp_path / "ran").exists()) == (True, False)


EPOCHS = "actor_rollout_ref.actor.ppo_epochs"


@pytest.mark.parametrize(
    ("error", "key"),
    [
        ("AssertionError('actor.ppo_epochs (3) is odd')", EPOCHS),
        (f"omegaconf.ConfigError('Could not override {EPOCHS}')", EPOCHS),
        ("ValueError('n_gpus is odd')", ""),
    ],
)
def test_what_a_program_refuses_is_named_at_its_setting(error, key, ran, tmp_path):
    (one,) = refused(ran(f"{EPOCHS}=3", body=f"raise {error}"))
    assert (one.severity, one.file) == ("error", str(tmp_path / "run.sh"))
    assert one.actual.endswith(f"({key} at {tmp_path}/run.sh:4)") if key else one.actual == "n_gpus is odd"
    assert f"{tmp_path}/verl/trainer/main_ppo.py:" in one.hint


def test_rolls_program_is_given_its_folder_of_settings_as_written(tmp_path):
    """The folder's way from the program, which Hydra's `initialize` wants, not its path."""
    program = "from argparse import ArgumentParser\nfrom roll.distributed.scheduler.initialize import init\n"
    program += "parser = ArgumentParser()\nfor name in ('path', 'name'): parser.add_argument(f'--config_{name}')\n"
    program += "assert parser.parse_args().config_path == 'jobs'\ninit()"
    start = "python examples/start_rlvr_pipeline.py --config_path jobs --config_name job"
    files = {
        "roll/__init__.py": "",
        "roll/distributed/scheduler/initialize.py": f"def init(): {BEGINS}",
        "examples/start_rlvr_pipeline.py": program,
        "examples/jobs/job.yaml": "actor_train: {model_args: {dtype: bf16}}",
        "run.sh": f"cd {tmp_path}\nexport PYTHONPATH={tmp_path}\n{start}\n",
    }
    write(tmp_path, files)
    report = preflight(script=tmp_path / "run.sh", ask_trainer=sys.executable)
    assert (refused(report), reasons(report)) == ([], [])
    write(tmp_path, {"examples/start_rlvr_pipeline.py": program.replace("'jobs'", "'other'")})
    assert len(refused(preflight(script=tmp_path / "run.sh", ask_trainer=sys.executable))) == 1


def test_where_no_trainer_is_found_the_report_says_what_to_do(tmp_path):
    words = tuple(map(Word, ["--hf-checkpoint", str(tmp_path), *RIGHT.split()]))
    for program, says in (("train.py", "was not found"), ("pretrain_gpt.py", "processes")):
        text = LaunchText(words, program=program, directory=tmp_path)
        assert reasons(preflight(text=text, ask_trainer=sys.executable)) == [text_with(says)]
    with pytest.raises(UsageError):
        preflight(text=text, ask_trainer=tmp_path / "python")
