"""Right launches of every stack and several families: no finding, nothing skipped, exit code 0 with `--strict`."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.processes import python

from ckptkit.app.api import model_arguments, quantize
from ckptkit.app.cli import cli
from ckptkit.converters.megatron.arguments import launch_flags
from ckptkit.quant.formats.scheme import QuantScheme

NAMES = ("qwen2-untied", "glm4_moe")
DROPOUT = "--attention-dropout 0.0 --hidden-dropout 0.0"
GPUS = "--rollout-num-gpus 8 --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 2"
BRIDGE = "--megatron-to-hf-mode bridge --ref-load {hf}"
VERL = """python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml algorithm.adv_estimator=grpo \\
  actor_rollout_ref.model.path={hf} actor_rollout_ref.actor.use_kl_loss=True trainer.resume_mode=disable \\
  {actor}.use_dist_checkpointing=True {actor}.dist_checkpointing_path={megatron}/release \\
  {ref}.use_dist_checkpointing=True {ref}.dist_checkpointing_path={megatron}/release \\
  {actor}.tensor_model_parallel_size=2 {actor}.pipeline_model_parallel_size=2 \\
  {ref}.tensor_model_parallel_size=2 \\
  actor_rollout_ref.rollout.name=sglang trainer.nnodes=1 trainer.n_gpus_per_node=8
"""
JOBS = Path(__file__).with_name("jobs")


def bash(folder, hf, megatron, paths):
    """A script in the style of slime and miles, whose model arguments stand in an array."""
    model = "\n".join(f"  {line}" for line in launch_flags(model_arguments(hf)) if not line.startswith("#"))
    paths = paths.format(hf=shlex.quote(str(hf)), megatron=shlex.quote(str(megatron)))
    text = f"MODEL=(\n{model}\n)\npython3 train.py {GPUS} --hf-checkpoint {hf} {paths} \\\n"
    text += "  --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
    text += f"{DROPOUT} ${{MODEL[@]}}\n"
    (folder / "run.sh").write_text(text)
    return folder / "run.sh"


def verl(folder, hf, megatron):
    roles = {role: f"actor_rollout_ref.{role}.megatron" for role in ("actor", "ref")}
    (folder / "run.sh").write_text(VERL.format(hf=hf, megatron=megatron, **roles))
    return folder / "run.sh"


def nemo_rl(folder, hf, megatron):
    text = (JOBS / "nemo_rl.yaml").read_text().replace("results/none", str(folder / "results"))
    text = text.replace("???", f"{hf}\n  pretrained_checkpoint: {{path: {megatron}, format: megatron_lm}}")
    (folder / "job.yaml").write_text(text.replace("_model_parallel_size: 1", "_model_parallel_size: 2", 2))
    return folder / "job.yaml"


def roll(folder, hf, megatron):
    text = (JOBS / "roll.yaml").read_text().replace("MODEL", str(hf)).replace("expert_model_parallel_size: 4, ", "")
    (folder / "job.yaml").write_text(text.replace("      expert_model_parallel_size: 2\n", ""))
    return folder / "job.yaml"


STACKS = {
    "slime": lambda folder, hf, megatron: bash(folder, hf, megatron, "--ref-load {megatron}"),
    "miles": lambda folder, hf, megatron: bash(folder, hf, megatron, BRIDGE),
    "verl": verl,
    "NeMo-RL": nemo_rl,
    "ROLL": roll,
}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", NAMES)
def test_right_launch_passes_strictly(name, stack, releases, converted, tmp_path, monkeypatch):
    """Megatron weights without a manifest, which were converted from the release: samples of them are compared."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "copies"))
    megatron = Path(shutil.copytree(converted(name), tmp_path / "megatron"))
    (megatron / "ckptkit.json").unlink()
    script = STACKS[stack](tmp_path, releases(name), megatron)
    done = CliRunner().invoke(cli, ["preflight", str(script), "--strict", "--json"])
    report = json.loads(done.stdout)
    assert (report["status"], report["findings"], report["reasons"]) == ("passed", [], [])
    assert [one for one in report["checks"] if one["status"] != "passed"] == []
    assert done.exit_code == 0, done.stderr
    assert "what would be loaded" in report["facts"]


# Runs commands and writes the names of all modules that are there then.
RUN = """
import contextlib, json, sys
from ckptkit.app.cli import cli
for command in json.loads(sys.argv[1]):
    with contextlib.suppress(SystemExit):
        cli.main(command, standalone_mode=False)
print(json.dumps(list(sys.modules)), file=sys.stderr)
"""


def test_a_launch_of_no_stack_imports_torch(releases, converted, tmp_path):
    """Samples of Megatron weights without a manifest are read, too, and the list of an INT4 release is compared."""
    megatron = Path(shutil.copytree(converted("qwen3_moe"), tmp_path / "megatron"))
    (megatron / "ckptkit.json").unlink()
    commands = []
    for stack, write in STACKS.items():
        (tmp_path / stack).mkdir()
        script = write(tmp_path / stack, releases("qwen3_moe"), megatron)
        commands.append(["preflight", str(script), "--json"])
    quantize(releases("qwen3_moe"), tmp_path / "int4", QuantScheme(32, "qmax7", (r"re:.*\.self_attn\..*",)))
    words = ["OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1", "--rollout-num-gpus-per-engine", "2", "--ref-load", str(megatron)]
    commands.append(["preflight", "--hf-checkpoint", str(tmp_path / "int4"), "--all", "--", *words])
    done = python("-c", RUN, json.dumps(commands))
    ran = {line.partition(" ")[0] for line in done.stdout.splitlines() if "  skipped " not in line}
    assert {"CK301", "CK302", "CK307", "CK709", "CK715", "CK716"} <= ran
    modules = set(json.loads(done.stderr.splitlines()[-1]))
    assert done.stdout.count('"status": "passed",\n  "reasons"') == len(STACKS)
    assert {"ckptkit.verify.launch.stacks.roll", "ckptkit.verify.evidence.samples"} <= modules
    assert modules & {"torch", "transformers", "compressed_tensors", "numba", "hydra", "omegaconf"} == set()
