"""Launches of programs that train and are not read: refused by name, with what can be done. As their documents have."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.messages import text_with

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.launch.preflight import preflight

COMMANDS = {
    "ms-swift": [
        "PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \\\nNPROC_PER_NODE=4 \\\nmegatron sft \\\n"
        "    --model Qwen/Qwen3-30B-A3B-Instruct-2507 \\\n    --expert_model_parallel_size 8",
    ],
    "SkyRL": [
        "uv run --isolated --extra vllm -m skyrl_train.entrypoints.main_base \\\n  trainer.strategy=fsdp2 \\\n"
        '  trainer.policy.model.path="Qwen/Qwen2.5-1.5B-Instruct" \\\n  generator.backend=vllm',
    ],
    "AReaL": [
        "python3 -m areal.launcher.ray examples/math/gsm8k_grpo.py \\\n"
        "    --config examples/math/gsm8k_grpo.yaml actor.path=Qwen/Qwen2-1.5B-Instruct",
    ],
    "OpenRLHF": [
        'ray job submit --address="http://127.0.0.1:8265" \\\n   -- python3 -m openrlhf.cli.train_ppo_ray \\\n'
        "   --actor_num_nodes 1 --actor_num_gpus_per_node 8 --vllm_num_engines 4 \\\n"
        "   --pretrain OpenRLHF/Llama-3-8b-sft-mixture",
    ],
    "TRL": [
        "trl grpo --model_name_or_path Qwen/Qwen2-0.5B-Instruct --dataset_name trl-lib/tldr",
        "accelerate launch --config_file=zero3.yaml trl/scripts/sft.py --model_name_or_path Qwen/Qwen2-0.5B",
    ],
}
FILES = {
    "ms-swift": ("model: Qwen/Qwen2.5-7B-Instruct\nrlhf_type: grpo\ntrain_type: lora\n", ".yaml"),
    "AReaL": (
        "experiment_name: gsm8k-grpo\nallocation_mode: sglang:d4p1t1+d4p1t1\n"
        'actor: {path: Qwen/Qwen2-1.5B-Instruct}\nsglang: {model_path: "${actor.path}"}\n',
        ".yaml",
    ),
    "SkyRL": ("trainer: {strategy: fsdp2}\ngenerator: {backend: vllm}\nenvironment: {env_class: gsm8k}\n", ".yaml"),
    "TRL": ("from trl import GRPOTrainer\n\nGRPOTrainer(model='Qwen/Qwen2-0.5B-Instruct').train()\n", ".py"),
}
LAUNCHES = [(name, one, ".sh") for name, all_of in COMMANDS.items() for one in all_of]
LAUNCHES += [(name, text, suffix) for name, (text, suffix) in FILES.items()]


@pytest.mark.parametrize(("name", "text", "suffix"), LAUNCHES)
def test_launch_of_a_program_that_is_not_read_is_refused_by_name(
    name: str, text: str, suffix: str, tmp_path: Path
) -> None:
    file = tmp_path / f"run{suffix}"
    file.write_text(f"{text}\n")
    with pytest.raises(CkptkitError) as refused:
        preflight(script=file)
    assert refused.value.message == text_with(f"{file} {name};")
    assert "`ckptkit verify DIR`" in str(refused.value.hint)


def test_words_of_a_command_are_told_apart_by_its_program_alone(tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match="OpenRLHF"):
        preflight(arguments=["python3", "-m", "openrlhf.cli.train_ppo_ray", "--pretrain", "x"])
    words = ["python3", "train.py", "--hf-checkpoint", str(tmp_path), "--prompt-data", "/data/trl/scripts/x"]
    assert [one.code for one in preflight(arguments=words).findings] == ["CK714"]


@pytest.mark.parametrize("text", ["# trl sft would do too\necho", "cat trl.txt", "python3 nothing.py"])
def test_what_only_mentions_such_a_program_is_no_launch_of_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{text}\n")
    with pytest.raises(CkptkitError, match="trainer"):
        preflight(script=tmp_path / "run.sh")
