"""A checkout in the shape of miles': models and launchers in Python, which can be run, and are read."""

import json
import os
import subprocess
import sys
from pathlib import Path

TOOL = Path("miles/utils/external_utils/model_args_utils.py")
_TOOL = """
import importlib.util, sys
from pathlib import Path

MODELS = Path(__file__).resolve().parents[3] / "scripts" / "models"


def load_model_args(name, folder=None, **given):
    sys.modules.setdefault("model_args_utils", sys.modules[__name__])
    spec = importlib.util.spec_from_file_location("model", (folder or MODELS) / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return " ".join(module.model_args(**given).split())


def load_sibling_model_args(file, name, **given):
    return load_model_args(name, Path(file).resolve().parent, **given)


def moe_layer_freq(*, nlayers, first_k_dense_replace):
    dense = min(first_k_dense_replace, nlayers)
    return "[" + ",".join(["0"] * dense + ["1"] * (nlayers - dense)) + "]"


if __name__ == "__main__":
    print(load_model_args(sys.argv[1]))
"""
MODELS = {
    "dense": """
import os


def model_args(rotary_base: str | None = None) -> str:
    rotary_base = rotary_base if rotary_base is not None else os.environ.get("MODEL_ARGS_ROTARY_BASE") or "1000000"
    return (
        "--swiglu "
        "--num-layers 36 "
        # heads
        "--hidden-size 2560 --num-attention-heads 32 "
        f"--rotary-base {rotary_base} "
    )
""",
    "moe": """
import os

from model_args_utils import moe_layer_freq

DENSE = 3
EXPERT = 2048
SHARED = EXPERT * 2


def model_args(nlayers: int | None = None, first_k_dense_replace: int = DENSE) -> str:
    nlayers = nlayers if nlayers is not None else int(os.environ.get("MODEL_ARGS_NUM_LAYERS") or 61)
    return (
        f"--num-layers {nlayers} "
        f"--moe-layer-freq {moe_layer_freq(nlayers=nlayers, first_k_dense_replace=first_k_dense_replace)} "
        f"--moe-ffn-hidden-size {EXPERT} --moe-shared-expert-intermediate-size {SHARED} "
    )
""",
    "moe_2layer": """
from model_args_utils import load_sibling_model_args


def model_args() -> str:
    return load_sibling_model_args(__file__, "moe", nlayers=2, first_k_dense_replace=1)
""",
    "pattern": """
N_DENSE = 1
N_MOE = 45
ARGS = [f"--num-layers {N_DENSE + N_MOE}", f"--moe-layer-freq [0]*{N_DENSE}+[1]*{N_MOE}"]


def model_args(extra: str = "") -> str:
    kinds = " ".join(str(one) for one in range(1, 6, 2))
    lines = [*ARGS, f"--kinds {kinds}"]
    if not extra:
        lines += ["--vocab-size 1024"]
    return "\\n".join(lines)
""",
}
_COMMANDS = """
import json, os, shlex
from dataclasses import dataclass, field

GPUS = {"H100": 8, "GB200": 4}


@dataclass
class ExecuteTrainConfig:
    num_nodes: int = field(default_factory=lambda: int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    output_dir: str = "/data/runs"


def dataclass_cli(function):
    return function


def exec_command_cpu(command):
    raise SystemExit("nothing is run here")


def get_default_wandb_args(file, run_id=None):
    if not os.environ.get("WANDB_API_KEY"):
        return ""
    return f"--use-wandb --wandb-group {run_id} "


def create_run_id():
    import datetime

    return datetime.datetime.utcnow().strftime("%y%m%d-%H%M%S")


def execute_train(train_args, num_gpus_per_node, megatron_model_type, extra_env_vars=None, config=None):
    from miles.utils.external_utils.model_args_utils import load_model_args

    model = load_model_args(megatron_model_type) if megatron_model_type else ""
    print(json.dumps([*model.split(), *shlex.split(train_args)]))
"""
_TYPER = """
class Typer:
    def command(self):
        return lambda function: function

    def callback(self):
        return lambda function: function

    def __call__(self):
        import sys

        main = sys.modules["__main__"]
        main.train(main.ScriptArgs())


def run(function):
    import sys

    function(sys.modules["__main__"].ScriptArgs())
"""


def write_checkout(folder):
    """Writes the checkout, and returns the path of its tool for model arguments."""
    tools = folder / TOOL.parent
    tools.mkdir(parents=True)
    for package in (folder / "miles", folder / "miles/utils", tools):
        (package / "__init__.py").write_text("")
    (folder / TOOL).write_text(_TOOL)
    (tools / "command_utils.py").write_text(_COMMANDS)
    (folder / "typer.py").write_text(_TYPER)
    models = folder / "scripts" / "models"
    models.mkdir(parents=True)
    for name, text in MODELS.items():
        (models / f"{name}.py").write_text(text)
    return folder / TOOL


def printed(folder, file, arguments, environment):
    """What Python prints for a file of the checkout."""
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), **environment}
    command = [sys.executable, "-W", "ignore", str(file), *arguments]
    return subprocess.check_output(command, text=True, env=variables, cwd=folder).strip()


def printed_words(folder, file, environment):
    """The words that a launcher gives to its trainer, which its last line of output holds."""
    return json.loads(printed(folder, file, [], environment).splitlines()[-1])
