"""Commands of README and docs/ run as the pages say, on small models, or the page says why they do not run here."""

import re
import shutil
import sys
from pathlib import Path

import boto3
import pytest
import torch
import yaml
from families.case import MOE, SIZES, Case, save
from huggingface_hub import HfFileSystem, constants
from releases.record import load
from support import models, published
from support.deltas import publish_chain
from support.fake_hub import fake_hub
from support.page_blocks import BLOCKS, PAGES, Shell, bash
from support.remote_servers import Bucket, s3_server, use_s3
from transformers import Qwen3MoeConfig

MODEL = "Qwen/Qwen3-30B-A3B"
_LAUNCH = (
    'python3 train.py "${MODEL_ARGS[@]}" --hf-checkpoint Qwen3-30B-A3B --load qwen3-megatron --ref-load qwen3-megatron'
)
_TWO = "--tensor-model-parallel-size 2 --sequence-parallel"
_SLIME = f"source model-args.sh\n{_LAUNCH} {_TWO} --expert-model-parallel-size 2\n"
SCRIPTS = {
    "run-slime.sh": _SLIME,
    "run-miles.sh": f"source model-args.sh\n{_LAUNCH} --megatron-to-hf-mode raw {_TWO}\n",
    "run-verl.sh": "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer"
    " actor_rollout_ref.model.path=Qwen3-30B-A3B actor_rollout_ref.rollout.name=sglang"
    " actor_rollout_ref.actor.megatron.use_dist_checkpointing=True"
    " actor_rollout_ref.actor.megatron.dist_checkpointing_path=qwen3-megatron/release"
    " actor_rollout_ref.ref.megatron.use_dist_checkpointing=True"
    " actor_rollout_ref.ref.megatron.dist_checkpointing_path=qwen3-megatron/release\n",
}
# Programs that clusters have: what they are given to run is run at once.
PROGRAMS = {
    "ckptkit": f'exec {sys.executable} -m ckptkit "$@"',
    "python3": "exit 0",
    # Job 7 is the one with --wrap, and the other one starts if that ended with 0.
    "sbatch": """for word; do
    if [ "$word" = --dependency=afterok:7 ]; then exit "$(cat job-7)"; fi
    if [ "$before" = --wrap ]; then bash -c "$word" >&2; echo $? > job-7; echo 7; fi
    before=$word
done""",
    "ray": 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A small model under the name that the pages use, in three shards: 4 layers and 4 experts."""
    path, sizes = tmp_path_factory.mktemp("pages") / "Qwen3-30B-A3B", {**SIZES, **MOE, "num_hidden_layers": 4}
    small = Case(lambda: Qwen3MoeConfig(**sizes, num_experts=4, norm_topk_prob=True))
    save("qwen3_moe", small, path, torch.bfloat16, shard_size="800KB")
    assert len(list(path.glob("*.safetensors"))) == 3
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def shell(tiny, store, tmp_path, monkeypatch):
    """A shell of 80 columns in a directory with the model and the launch scripts."""
    shutil.copytree(tiny, tmp_path / tiny.name)
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return Shell(store)


@pytest.fixture
def hub(request, tiny, monkeypatch):
    """A hub that has the small model under the release's name."""
    with fake_hub(getattr(request, "param", MODEL), tiny, []) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        HfFileSystem.clear_instance_cache()
        yield
    HfFileSystem.clear_instance_cache()


def blocks(page, section=""):
    found = [block for block in BLOCKS if (block.page, block.mark) == (page, "run") and section in ("", block.section)]
    assert found
    return found


def run_page(page, shell, section=""):
    """Runs the blocks of a page, or of a section. A remark says which exit code a command has, if it is not 0."""
    for block in blocks(page, section):
        if block.kind == "python":
            exec(block.text, {})  # noqa: S102 - as a reader would
            continue
        for line in block.commands:
            command, _, remark = line.partition("  # exits ")
            assert shell.run(command, block.without)[0] == int(remark or 0), command


def test_every_block_is_text_or_runs_or_says_why_not():
    shell = [block for block in BLOCKS if block.kind in ("bash", "console")]
    assert {block.kind for block in BLOCKS} == {"bash", "console", "python", "text", "yaml"}
    assert [block for block in shell if not block.mark] == []
    python = [block for block in BLOCKS if block.kind == "python" and block.mark]
    assert [block for block in BLOCKS if block.mark and block not in [*shell, *python]] == []
    for block in [*shell, *python]:
        assert bool(block.reason) == (block.mark == "not run" or bool(block.without)), block
        if block.without:
            assert block.without in block.text
        if block.reason:
            print(f"{block.page}: {block.mark} {block.without or ''}: {block.reason}")
    assert sum(len(re.findall("<!-- (?:not )?run", page.read_text())) for page in PAGES) == len([*shell, *python]), (
        "a mark stands before no block"
    )
    # Of a line that begins as a command does in a block of text, nobody would know whether it is right.
    commands = re.compile(r"^(?:\$ |(?:pip|make|python3?|hf|ray) )", re.M)
    assert [block for block in BLOCKS if block.kind == "text" and commands.search(block.text)] == []


@pytest.mark.parametrize("hub", ["HuggingFaceTB/SmolLM2-135M-Instruct"], indirect=True)
@pytest.mark.usefixtures("hub")
def test_readme_takes_a_release_from_the_hub_to_int4(shell):
    run_page("README.md", shell)


@pytest.mark.usefixtures("hub")
def test_start_page_runs_from_its_first_to_its_last_step(shell):
    run_page("docs/index.md", shell)


def test_each_stack_has_its_own_commands(shell):
    for block in blocks("docs/jobs.md", "Your job in five lines"):
        for line in block.commands:
            if "ckptkit convert Qwen" not in line or not Path("qwen3-megatron").exists():
                assert shell.run(line)[0] == 0, line


def test_manifests_are_written_signed_and_verified(shell, tiny):
    for name in ("PATH", "COPY"):
        shutil.copytree(tiny, name)
    run_page("docs/verify.md", shell, "Manifests")


def test_updates_are_verified_and_made_full(shell, tiny, tmp_path):
    publish_chain(tmp_path / "updates", tiny, ("xor", "overwrite"))
    run_page("docs/convert.md", shell, "Weight updates as deltas on disk")


def test_what_an_engine_can_be_sent_is_quantized(shell, tmp_path):
    models.save("glm4_moe", tmp_path / "GLM-4.5")
    run_page("docs/jobs.md", shell, "Quantizing while a trainer streams weights")


def test_lint_prints_the_transcript_of_its_page(shell, tmp_path):
    [block] = blocks("docs/lint.md")
    published.write(tmp_path / "Qwen3-30B-A3B-W4A16", load(MODEL).config, ["lm_head", "re:.*mlp.gate$"])
    [command] = block.commands
    assert shell.run(command) == (1, block.text.partition("\n")[2])


@pytest.mark.usefixtures("hub")
def test_checkpoints_at_urls_are_read_and_written(shell, tiny, tmp_path, monkeypatch):
    with s3_server(tmp_path / "log") as address, use_s3(monkeypatch, address):
        bucket = Bucket("bucket", boto3.client("s3", endpoint_url=address))
        bucket.client.create_bucket(Bucket=bucket.name)
        bucket.put_directory(tiny, "qwen")
        [block] = blocks("docs/convert.md", "Checkpoints at URLs")
        for line in block.commands:
            assert shell.run(line)[0] == 0, line
            if "hf://" in line and "convert" in line:  # and the model was trained
                shutil.copytree("qwen-megatron/release", "qwen-megatron/iter_0000100")
        assert {"exports/100/config.json", "qwen-int4/config.json"} <= {*bucket.listed()}


@pytest.fixture
def programs(shell, tiny, tmp_path):
    """A folder with the programs of a cluster; the model is there in Megatron's format too, and in HF's also broken."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    shell.run(f"ckptkit convert {tiny.name} qwen3-megatron")
    shutil.copytree(tiny, "broken")
    next(Path("broken").glob("*.safetensors")).unlink()
    return folder


@pytest.mark.parametrize("number", range(3))
def test_a_job_starts_only_behind_its_check(number, programs, tiny):
    text = blocks("docs/jobs.md", "Checks inside a job, and before it")[number].text
    for name, code in ((tiny.name, 0), ("broken", 1)):
        done = bash(text, programs, HF=name, LOAD="qwen3-megatron", REF="qwen3-megatron")
        assert done.returncode == code, done.stdout + done.stderr


def snippet(key):
    """The configuration in docs/jobs.md that has this key at its top."""
    found = [yaml.safe_load(block.text) for block in BLOCKS if block.page == "docs/jobs.md" and block.kind == "yaml"]
    [one] = [content for content in found if key in content]
    return one


def test_configurations_of_ci_run_the_check_and_keep_its_report(programs, tiny):
    steps = snippet("jobs")["jobs"]["preflight"]["steps"]
    [check] = [step["run"] for step in steps if "ckptkit preflight" in step.get("run", "")]
    [summary] = [step for step in steps if "SUMMARY" in step.get("run", "")]
    gitlab = snippet("stages")["preflight"]
    [hook] = snippet("repos")["repos"][0]["hooks"]
    for name, code, said in ((tiny.name, 0, "PASSED"), ("broken", 1, "FAILED")):
        for command in (check, *gitlab["script"]):
            line = command.replace("/hf/qwen3", name).replace("/ckpt/qwen3", "qwen3-megatron")
            assert bash(line, programs).returncode == code, line
        assert bash(summary["run"], programs, GITHUB_STEP_SUMMARY="summary.md").returncode == 0
        assert said in Path("summary.md").read_text()
        assert all(Path(file).exists() for file in (*gitlab["artifacts"]["paths"], "preflight.xml", "preflight.sarif"))
        Path("run-job.sh").write_text(f"python3 train.py --hf-checkpoint {name} --load qwen3-megatron\n")
        assert (bash(f"{hook['entry']} run-job.sh", programs).returncode == 0) == (code == 0)
    assert summary["if"] == "always()"
    assert gitlab["artifacts"]["when"] == "always"
    assert re.search(hook["files"], "scripts/run-qwen3.sh")
