"""`preflight --ask-trainer` with the own parsers of slime, miles and Megatron-LM: wrong launches, and published ones.

`SLIME` and `MILES` name checkouts, `MEGATRON_LM` the Megatron-LM that slime pins, with its patch, which adds options,
`MILES_MEGATRON_LM` that of miles. SGLang must be installed, since both take options from it.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from releases.record import load

from ckptkit.verify.launch.preflight import preflight

CONFIG = json.loads(
    '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, '
    '"num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 128, "head_dim": 16, "rms_norm_eps": 1e-6, '
    '"rope_theta": 10000.0, "vocab_size": 512, "tie_word_embeddings": true}'
)
# Each trainer's checkout, and the Megatron-LM that it wants.
CHECKOUTS = {"slime": ("SLIME", "MEGATRON_LM"), "miles": ("MILES", "MILES_MEGATRON_LM")}
RIGHT = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --kv-channels 16 --qk-layernorm --normalization RMSNorm --norm-epsilon 1e-6 "
    "--rotary-base 10000 --swiglu --disable-bias-linear --vocab-size 512 --use-rotary-position-embeddings "
    "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 --rollout-batch-size 8 "
    "--n-samples-per-prompt 8 --global-batch-size 64 --num-rollout 10 --rollout-num-gpus 8 "
    "--rollout-num-gpus-per-engine 2 --use-dynamic-batch-size --max-tokens-per-gpu 4096 --lr 1e-6"
)
# What breaks the right launch, and slime's, Megatron-LM's or argparse's own words.
WRONG = [
    ("--rotary-base 77", "rope_theta in hf config 10000.0 is not equal to rotary_base 77"),
    ("--num-layers 3", "num_hidden_layers in hf config 2 is not equal to num_layers 3"),
    ("--ffn-hidden-size 96", "intermediate_size in hf config 128 is not equal to ffn_hidden_size 96"),
    ("--untie-embeddings-and-output-weights", "tie_word_embeddings in hf config True is not equal to"),
    ("--tensor-model-parallel-size 3", "world size (8) is not divisible by total_model_size"),
    ("--kl-coef much", "invalid float value: 'much'"),
    ("--use-kl-loss --ref-load /nowhere", "/nowhere"),
    ("--sglang-dp-size 2", "sglang_enable_dp_attention"),
    ("--rollout-num-gpus-per-engine 3 --sglang-pp-size 2", "must be divisible by"),
    ("--advantage-estimator none-such", "invalid choice: 'none-such'"),
]
# Published scripts, and the release that each trains.
PUBLISHED = {
    "run-qwen3-4B.sh": "Qwen/Qwen3-4B",
    "run-qwen3-32B.sh": "Qwen/Qwen3-32B",
    "run-qwen3-30B-A3B.sh": "Qwen/Qwen3-30B-A3B",
    "run-glm4-9B.sh": "THUDM/GLM-4-9B-0414",
    "run-qwen3-235B-A22B-sft.sh": "Qwen/Qwen3-235B-A22B",
}


@pytest.fixture
def asked(tmp_path, checkout):
    """Has a trainer parse a launch that goes on with this text, and gives what it finds; it was asked and answered."""
    pytest.importorskip("sglang")

    def ask(text, trainer="slime"):
        home, megatron = map(checkout, CHECKOUTS[trainer])
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        script = tmp_path / "run.sh"
        setting = f"export PYTHONPATH={megatron} CUDA_DEVICE_MAX_CONNECTIONS=1"
        script.write_text(f"cd {home}\n{setting}\n{text}\n")
        report = preflight(script=script, ask_trainer=sys.executable)
        assert any(f"{trainer}" in note for note in report.facts["notes"]), report.reasons
        mine = (f"a launch that {trainer} accepts", f"options that {trainer} takes")
        return [one for one in report.findings if one.expected in mine]

    return ask


@pytest.mark.parametrize("trainer", CHECKOUTS)
@pytest.mark.parametrize(("words", "message"), WRONG)
def test_a_wrong_launch_is_refused_in_the_trainers_own_words(words, message, trainer, asked, tmp_path):
    found = asked(f"python3 train.py --hf-checkpoint {tmp_path} {RIGHT} {words}", trainer)
    if trainer == "miles" and "--sglang-pp-size" in words:  # which miles does not look at
        assert found == []
    else:
        assert [(one.severity, message in one.actual) for one in found] == [("error", True)]


@pytest.mark.parametrize("trainer", CHECKOUTS)
def test_the_right_launch_is_accepted_and_a_misspelled_option_is_named(trainer, asked, tmp_path):
    """slime ignores such an option silently, miles stops at it."""
    words = f"python3 train.py --hf-checkpoint {tmp_path} {RIGHT}"
    assert asked(f"{words} --sglang-mem-fraction-static 0.8", trainer) == []
    (found,) = asked(f"{words} --sglang-mem-fraction-statik 0.8", trainer)
    assert (found.severity, "--sglang-mem-fraction-statik" in found.actual) == (
        "warning" if trainer == "slime" else "error",
        True,
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_slimes_published_launches_are_accepted(name, asked, tmp_path, checkout, monkeypatch):
    scripts = checkout("SLIME") / "scripts"
    text = (scripts / name).read_text()
    home = re.findall(r"(/\w+)/Megatron-LM", text)[0]
    text = text.replace(f"{home}/Megatron-LM", str(checkout("MEGATRON_LM")))
    text = text.replace(f"{home}/", f"{tmp_path}/").replace('source "${SCRIPT_DIR}', f'source "{scripts}')
    for variable, value in (("BASE_FOLDER", str(tmp_path)), ("MASTER_ADDR", "127.0.0.1"), ("NUM_GPUS", "8")):
        monkeypatch.setenv(variable, value)
    for option, folder in re.findall(r"^\s*--(hf-checkpoint|ref-load) (\S+)", text, re.MULTILINE):
        path = Path(folder.strip('"').replace("${BASE_FOLDER}", str(tmp_path)))
        path.mkdir(parents=True, exist_ok=True)
        (path / "latest_checkpointed_iteration.txt").write_text("release")
        if option == "hf-checkpoint":
            (path / "config.json").write_text(json.dumps(load(PUBLISHED[name]).config))
    assert asked(text) == []
