"""Launchers in Python: the words that they give to the trainer, though they are never run."""

import pytest
from support.messages import text_with
from support.miles_checkout import printed_words, write_checkout

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.launch.python.launcher import read_launcher
from ckptkit.verify.launch.words import UnresolvedWord

LAUNCHER = """
import re
from dataclasses import dataclass
from typing import Literal

import typer

import miles.utils.external_utils.command_utils as U

GROUP = 32
_GRAPHS = " ".join(str(one) for one in [1, 2, *range(4, 9, 2)])


@dataclass(frozen=True)
class _Recipe:
    tp: int
    pp: int = 1
    extra: str = ""


_RECIPES = {"small": _Recipe(tp=2), "large": _Recipe(tp=8, pp=4, extra="--sequence-parallel ")}


@dataclass
class ScriptArgs(U.ExecuteTrainConfig):
    mode: Literal["normal", "debug"] = "normal"
    run_id: str = "run"
    model_name: str = "large"
    model_dir: str = "/models"
    model_type: str | None = None
    gpus: int | None = None
    hardware: str = "H100"
    bridge: bool = False
    extra_args: str = ""

    def __post_init__(self):
        if (match := re.search(r"(\\d+)layer", self.model_name)) is not None:
            self.model_type = f"moe_{match.group(1)}layer"
        else:
            self.model_type = "moe"
        self.gpus = self.gpus or U.GPUS[self.hardware]
        if self.mode == "wrong":
            raise ValueError("no such mode")

    @property
    def recipe(self) -> _Recipe:
        return _RECIPES[self.model_name]


def _checkpoints(args: ScriptArgs) -> str:
    text = f"--hf-checkpoint {args.model_dir}/{args.model_name}{'-debug' if args.mode == 'debug' else ''} "
    if not args.bridge:
        text += f"--ref-load {args.model_dir}/{args.model_name}_torch_dist "
    return text


def execute(args: ScriptArgs):
    U.exec_command_cpu(f"mkdir -p {args.model_dir}") if args.mode == "never" else None
    perf = f"--tensor-model-parallel-size {args.recipe.tp} --pipeline-model-parallel-size {args.recipe.pp} "
    perf += args.recipe.extra
    match args.hardware:
        case "H100" | "H200":
            perf += "--actor-num-gpus-per-node 8 "
        case "GB200":
            perf += "--actor-num-gpus-per-node 4 "
        case _:
            raise NotImplementedError
    variables = {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}
    variables |= {"OPEN_TRAINING_INT4_GROUP_SIZE": str(GROUP)}
    U.execute_train(
        train_args=f"{_checkpoints(args)} {perf} "
        f"--actor-num-nodes {args.num_nodes} {U.get_default_wandb_args(__file__, run_id=args.run_id)} "
        f"--sglang-cuda-graph-bs {_GRAPHS} --save {args.output_dir}/{args.run_id} {args.extra_args} ",
        num_gpus_per_node=args.gpus,
        megatron_model_type=args.model_type,
        extra_env_vars={**variables},
        config=args,
    )


@U.dataclass_cli
def main(args: ScriptArgs):
    execute(args)


if __name__ == "__main__":
    typer.run(main)
"""
COMMANDS = LAUNCHER.replace(
    "@U.dataclass_cli\ndef main(",
    "app = typer.Typer()\n\n\n@app.command()\n@U.dataclass_cli\ndef prepare(args: ScriptArgs):\n    pass\n\n\n"
    "@app.command()\n@U.dataclass_cli\ndef train(",
).replace("typer.run(main)", "app()")


def write(folder, text=LAUNCHER, changed=("", "")):
    write_checkout(folder)
    script = folder / "scripts" / "run_model.py"
    script.write_text(text.replace(*changed) if changed[0] else text)
    return script


def words(read):
    return [word.text for word in read.words]


# What is changed in a launcher, and the environment that it is started in.
CHANGES = {
    "nothing": (("", ""), {}),
    "the environment": (("", ""), {"SLURM_JOB_NUM_NODES": "4", "WANDB_API_KEY": "k"}),
    "another model": (('model_name: str = "large"', 'model_name: str = "small"'), {}),
    "other hardware": (('hardware: str = "H100"', 'hardware: str = "GB200"'), {}),
    "a mode": (('"debug"] = "normal"', '"debug"] = "debug"'), {}),
    "bridge": (("bridge: bool = False", "bridge: bool = True"), {}),
    "a variable of the models": (
        ("    U.execute_train(", '    import os\n    os.environ["MODEL_ARGS_NUM_LAYERS"] = "4"\n    U.execute_train('),
        {},
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_words_are_those_that_the_launcher_gives(name, tmp_path):
    changed, environment = CHANGES[name]
    script = write(tmp_path, COMMANDS if name == "nothing" else LAUNCHER, changed)
    read = read_launcher(script, [], environment)
    assert words(read) == printed_words(tmp_path, script, environment)
    assert read.unresolved == ()
    variables = {name: word.text for name, word in read.environment.items()}
    assert variables == {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1", "OPEN_TRAINING_INT4_GROUP_SIZE": "32"}


def test_options_and_variables_set_fields_as_the_command_line_does(tmp_path):
    script = write(tmp_path)
    options = ["--model-name", "small", "--num-nodes=3", "--bridge"]
    given = words(read_launcher(script, options, {}))
    assert given[given.index("--actor-num-nodes") + 1] == "3"
    assert given[given.index("--tensor-model-parallel-size") + 1] == "2"
    assert "--ref-load" not in given
    variable = words(read_launcher(script, [], {"MILES_SCRIPT_MODEL_NAME": "small"}))
    assert variable[variable.index("--tensor-model-parallel-size") + 1] == "2"
    with pytest.raises(CkptkitError, match="--nodes.*ScriptArgs"):
        read_launcher(script, ["--nodes", "2"], {})


def test_words_stand_at_the_lines_of_their_options(tmp_path):
    script = write(tmp_path)
    places = {word.text: word.place for word in read_launcher(script, [], {}).words}
    line = next(number for number, one in enumerate(LAUNCHER.splitlines(), 1) if "--ref-load" in one)
    assert places["--ref-load"] == f"{script}:{line}"
    assert places["--moe-layer-freq"].startswith(f"{tmp_path}/scripts/models/moe.py:")


UNKNOWN = {
    "condition": ("not args.bridge", "machine().has_links", "--ref-load", "it depends on `machine().has_links`"),
    "value": ("{args.num_nodes}", "{machine().nodes}", "--actor-num-nodes", "{machine().nodes}"),
    "object": ("perf = f", "machine().prepare(args)\n    perf = f", "--hf-checkpoint", "the call of prepare at line"),
    "options of another module": ("{args.extra_args} ", "{machine().options} ", "{machine().options}", "machine"),
}


def test_commands_with_different_launches_ask_for_the_one_that_is_meant(tmp_path):
    two = "args: ScriptArgs):\n    args.num_nodes = 7\n    execute(args)\n\n\n"
    script = write(tmp_path, COMMANDS, ("args: ScriptArgs):\n    pass\n\n\n", two))
    line = next(n for n, text in enumerate(script.read_text().splitlines(), 1) if "U.execute_train(" in text)
    assert read_launcher(script, [], {}).unresolved == (text_with(f"{script}:{line} --"),)
    for command, nodes in (("prepare", "7"), ("train", "1")):
        found = words(read_launcher(script, [command], {}))
        assert found[found.index("--actor-num-nodes") + 1] == nodes


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_depends_on_anything_else_is_not_known(name, tmp_path):
    before, after, option, why = UNKNOWN[name]
    text = LAUNCHER.replace("import typer\n", "import typer\nfrom cluster import machine\n")
    assert before in text
    read = read_launcher(write(tmp_path, text, (before, after)), [], {})
    (line,) = [line for line in read.unresolved if option in line][:1]
    assert why in line
    # What does not depend on it is known all the same.
    assert "--sglang-cuda-graph-bs" in [word.text for word in read.words if not isinstance(word, UnresolvedWord)]


def test_directory_with_the_time_of_the_start_in_its_name_is_a_new_one(tmp_path):
    change = ("--save {args.output_dir}/{args.run_id}", "--load {args.output_dir}/{U.create_run_id()}")
    read = read_launcher(write(tmp_path, changed=change), [], {})
    assert ("--load" in words(read), read.unresolved) == (True, ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('hello')\n", "not call execute_train"),
        ("def main(:\n", "run_model.py:1: "),
        (LAUNCHER.replace('"debug"] = "normal"', '"debug"] = "wrong"'), "not call execute_train"),
    ],
)
def test_file_that_starts_no_trainer_is_refused(text, said, tmp_path):
    with pytest.raises(CkptkitError, match=said):
        preflight(script=write(tmp_path, text))


# A checkout in the shape of slime's: models in bash, and a launcher beside them.
UTILS = """
import os
from dataclasses import dataclass


@dataclass
class ExecuteTrainConfig:
    num_nodes: int = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    extra_env_vars: str = ""
"""
TINY = """
MODEL_ARGS=(
   --num-layers 4
   --hidden-size 64 --rotary-base "${MODEL_ARGS_ROTARY_BASE:-10000}"
)
"""
OF_SLIME = """
from dataclasses import dataclass

import typer

import slime.utils.external_utils.command_utils as U


@dataclass
class ScriptArgs(U.ExecuteTrainConfig):
    model_type: str = "tiny"
    num_gpus: int = 8


@U.dataclass_cli
def main(args: ScriptArgs):
    U.exec_command(f"mkdir -p {args.num_gpus}")
    U.execute_train(
        train_args=f"--hf-checkpoint /hf --actor-num-gpus-per-node {args.num_gpus} ",
        num_gpus_per_node=args.num_gpus,
        megatron_model_type=args.model_type,
    )


if __name__ == "__main__":
    typer.run(main)
"""


def of_slime(folder, place="scripts/run_tiny.py", text=OF_SLIME):
    files = {"slime/utils/external_utils/command_utils.py": UTILS, "scripts/models/tiny.sh": TINY, place: text}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder / place


MODEL_WORDS = ["--num-layers", "4", "--hidden-size", "64", "--rotary-base", "10000", "--hf-checkpoint", "/hf"]


@pytest.mark.parametrize("place", ["scripts/run_tiny.py", "run_tiny.py", "tests/deep/er/test_tiny.py"])
def test_models_of_slime_are_scripts_of_its_checkout(place, tmp_path):
    read = read_launcher(of_slime(tmp_path, place), [], {})
    assert (words(read), read.unresolved) == ([*MODEL_WORDS, "--actor-num-gpus-per-node", "8"], ())
    assert [f"{word.file}:{word.line}" for word in read.words[:2]] == [f"{tmp_path}/scripts/models/tiny.sh:3"] * 2


def test_checkout_of_slime_may_be_named_by_a_variable(tmp_path):
    of_slime(tmp_path / "slime checkout")
    (tmp_path / "run.py").write_text(OF_SLIME)
    for variable in ("SLIME_DIR", "SLIME"):
        read = read_launcher(tmp_path / "run.py", [], {variable: str(tmp_path / "slime checkout")})
        assert (words(read)[:8], read.unresolved) == (MODEL_WORDS, ())
    (line,) = read_launcher(tmp_path / "run.py", [], {}).unresolved
    assert line.startswith(f"{tmp_path}/run.py: ")
    assert "set SLIME_DIR" in line


def test_model_of_slime_that_is_not_there_is_named(tmp_path):
    (line,) = read_launcher(of_slime(tmp_path, text=OF_SLIME.replace('"tiny"', '"tinny"')), [], {}).unresolved
    assert "scripts/models/tinny.sh" in line


def test_variables_and_options_of_a_launcher_of_slime_count(tmp_path):
    launcher = of_slime(tmp_path)
    read = read_launcher(launcher, ["--num-gpus", "2"], {"MODEL_ARGS_ROTARY_BASE": "5"})
    assert (words(read)[5], words(read)[-1]) == ("5", "2")
    assert words(read_launcher(launcher, [], {"SLIME_SCRIPT_NUM_GPUS": "4"}))[-1] == "4"
    none = of_slime(tmp_path, text=OF_SLIME.replace('"tiny"', "None").replace(": str", ": str | None"))
    assert words(read_launcher(none, [], {}))[0] == "--hf-checkpoint"


@pytest.mark.parametrize("kind", ["../../../../etc/passwd\0", "$(touch pwned)", "a'; touch pwned; '"])
def test_model_name_of_a_launcher_runs_nothing(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    launcher = of_slime(tmp_path, text=OF_SLIME.replace('"tiny"', repr(kind)))
    assert read_launcher(launcher, [], {}).unresolved
    assert not (tmp_path / "pwned").exists()
