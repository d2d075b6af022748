"""Which engine a launch serves with: SGLang's kernels judge SGLang alone, speculative decoding is asked of both."""

import json

import pytest
import torch
from mutations.edits import edit_config
from safetensors.torch import save_file
from support.messages import text_with

from ckptkit.app.api import quantize
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.launch.preflight import preflight

ENGINE = "--rollout-num-gpus-per-engine"


def found(report, code):
    return [finding for finding in report.findings if finding.code == code]


@pytest.fixture(scope="module")
def int4(releases, tmp_path_factory):
    """qwen2-untied in INT4, which SGLang's kernels cannot share out over 4 ranks. Read only."""
    path = tmp_path_factory.mktemp("int4") / "qwen2-untied"
    quantize(releases("qwen2-untied"), path, QuantScheme(32, "qmax7"))
    return path


def test_sglangs_kernels_do_not_judge_a_launch_that_serves_with_vllm(int4):
    given = [ENGINE, "4", "--actor-num-gpus-per-node", "4"]
    sglang = preflight(hf_checkpoint=int4, ref_load=int4, arguments=[*given, "--sglang-mem-fraction-static", "0.7"])
    assert found(sglang, "CK715")
    vllm = preflight(hf_checkpoint=int4, ref_load=int4, arguments=[*given, "--vllm-gpu-memory-utilization", "0.7"])
    assert {"CK307", "CK309", "CK715"}.isdisjoint(one.code for one in vllm.checks if one.status != "skipped")


def test_heads_of_the_model_are_held_against_vllms_ranks_too(releases, only):
    given = [ENGINE, "3", "--vllm-gpu-memory-utilization", "0.7"]
    finding = only(preflight(hf_checkpoint=releases("qwen2-untied"), arguments=given))
    expected = text_with("num_attention_heads 3 ranks")
    assert (finding.code, finding.expected, finding.actual) == ("CK722", expected, text_with("10"))
    # vLLM leaves it to its launcher how many of a data parallel engine's GPUs share the tensors.
    for given in ([ENGINE, "6", "--vllm-pipeline-parallel-size", "3"], [ENGINE, "3", "--vllm-data-parallel-size", "3"]):
        assert preflight(hf_checkpoint=releases("qwen2-untied"), arguments=given).findings == []
    given = [ENGINE, "8", "--vllm-pipeline-parallel-size", "3"]
    finding = only(preflight(hf_checkpoint=releases("qwen2-untied"), arguments=given))
    assert finding.expected == text_with("rollout_num_gpus_per_engine vllm_pipeline_parallel_size = 3")


def test_a_trainer_does_not_load_weights_of_four_bits(int4, releases, copy_of):
    """The engine may. Megatron-Bridge unpacks those of Kimi K2, and an adapter is trained over a base as it is."""
    bf16 = releases("qwen2-untied")
    (finding,) = found(preflight(hf_checkpoint=int4, ref_load=int4), "CK711")
    assert (finding.severity, finding.expected) == ("error", text_with("BF16 actor"))
    assert "4 bits" in finding.actual
    nvfp4 = copy_of(bf16)
    edit_config(nvfp4, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []})
    assert [one.code for one in preflight(ref_load=nvfp4).findings if one.expected == finding.expected] == ["CK711"]
    edit_config(nvfp4, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    trainers = ({"hf_checkpoint": int4, "ref_load": bf16}, {"hf_checkpoint": int4}, {"ref_load": nvfp4})
    assert [found(preflight(**one), code) for one in trainers for code in ("CK711", "CK712")] == [[]] * 6
    words = ["--lora-rank", "8", "--target-modules", "q_proj"]
    assert found(preflight(hf_checkpoint=int4, ref_load=int4, arguments=words), "CK711") == []


SPECULATIVE, NO_DRAFT = "--sglang-speculative", "draft model"
ALGORITHM = f"{SPECULATIVE}-algorithm"
NOWHERE = [f"{SPECULATIVE}-algorithm=EAGLE", f"{SPECULATIVE}-draft-model-path", "/no/such/draft"]


def for_vllm(**settings):
    return ["--vllm-speculative-config", json.dumps({"num_speculative_tokens": 3} | settings)]


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("qwen2-untied", [ALGORITHM, "EAGLE"], NO_DRAFT),
        ("mimo", [ALGORITHM, "EAGLE3"], "--sglang-speculative-draft-model-path EAGLE3"),
        ("qwen2-untied", NOWHERE, "/no/such/draft"),
        ("qwen2-untied", for_vllm(), '"model" draft_model'),
        ("glm4_moe-mtp", [ALGORITHM, "EAGLE"], ""),
        ("qwen2-untied", [ALGORITHM, "NGRAM"], ""),
        ("qwen2-untied", [f"{ALGORITHM}=EAGLE3", f"{SPECULATIVE}-draft-model-path=org/qwen2-eagle3"], ""),
        ("mimo", for_vllm(method="mtp"), ""),
        ("qwen2-untied", for_vllm(method="ngram"), ""),
    ],
)
def test_speculative_decoding_without_a_draft_is_found(name, words, said, releases):
    report = preflight(hf_checkpoint=releases(name), arguments=words)
    assert [(one.severity, one.expected) for one in found(report, "CK745")] == [("error", text_with(said))] * bool(said)
    assert {one.code: one.status for one in report.checks}["CK745"] == ("failed" if said else "passed")


def test_layers_count_by_their_weights_and_not_by_config(releases, copy_of):
    """Qwen3-Next is published with `mtp.` tensors and no number of them; MiniMax-M2 with a number and no tensor."""
    path, given = copy_of(releases("glm4_moe-mtp")), [ALGORITHM, "EAGLE"]
    edit_config(path, num_nextn_predict_layers=0)
    assert found(preflight(hf_checkpoint=path, arguments=given), "CK745") == []
    minimax = releases("minimax_m2")
    assert json.loads((minimax / "config.json").read_text())["num_mtp_modules"] == 3
    assert len(found(preflight(hf_checkpoint=minimax, arguments=given), "CK745")) == 1


@pytest.mark.parametrize(
    "given",
    [
        "method=eagle3 model=$NOBODY_SETS_IT num_speculative_tokens=3",
        "method=ngram num_speculative_tokens=$NOBODY_SETS_IT",
        "method=suffix",
    ],
)
def test_what_is_not_known_of_a_draft_is_not_missing(given, releases, tmp_path):
    """A variable that nothing sets, in verl's settings of vLLM; without it the draft model is missing."""
    at = "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"
    model = f"actor_rollout_ref.model.path={releases('qwen2-untied')} actor_rollout_ref.rollout.name=vllm"
    script = tmp_path / "run.sh"

    def asked(words):
        settings = " ".join(word if word.startswith("$") else f"+{at}.{word}" for word in words.split())
        script.write_text(f"python3 -m verl.trainer.main_ppo {model} trainer.n_gpus_per_node=8 {settings}\n")
        return found(preflight(script=script), "CK745")

    assert asked(given) == []
    assert len(asked("method=eagle3 num_speculative_tokens=3")) == 1
    assert [one.expected for one in asked("method=ngram")] == ["num_speculative_tokens"]


SIZES = {"hidden_size": 128, "vocab_size": 352}  # of qwen2-untied
LLAMA = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 64, **SIZES}
PLAIN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES}
FUSED, LANGUAGE = ("fc.weight", "midlayer.mlp.up_proj.weight"), ("model.layers.0.mlp.up_proj.weight",)
KIMI = LLAMA | {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2"}
NESTED = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {},
    "transformer_layer_config": {"model_type": "llama", **SIZES},
}
# Engine, method, config.json of the draft, names of its tensors, the severity of what is found, and its words.
DRAFTS = [
    ("sglang", "EAGLE3", LLAMA, FUSED, "", ""),
    ("sglang", "EAGLE3", LLAMA | {"hidden_size": 64, "target_hidden_size": 128}, FUSED, "", ""),
    ("sglang", "EAGLE3", LLAMA | {"hidden_size": 64}, FUSED, "error", "64"),
    ("sglang", "EAGLE3", LLAMA | {"vocab_size": 360}, FUSED, "warning", "360"),
    ("sglang", "EAGLE", KIMI, FUSED, "error", "EAGLE, at"),
    ("sglang", "EAGLE3", PLAIN, LANGUAGE, "error", "fc.weight"),
    ("sglang", "EAGLE3", PLAIN, FUSED, "warning", "Qwen3ForCausalLM"),
    ("sglang", "EAGLE", PLAIN, LANGUAGE, "error", "a language model"),
    ("sglang", "EAGLE", PLAIN | {"num_nextn_predict_layers": 1}, LANGUAGE, "", ""),
    ("sglang", "EAGLE", PLAIN | {"architectures": ["DeepseekV3ForCausalLMNextN"]}, LANGUAGE, "", ""),
    ("sglang", "STANDALONE", PLAIN | {"hidden_size": 64}, LANGUAGE, "", ""),
    ("vllm", "eagle3", LLAMA | {"architectures": ["LlamaForCausalLM"]}, FUSED, "", ""),
    ("vllm", "eagle3", LLAMA | {"architectures": ["LlamaForCausalLM"]}, LANGUAGE, "error", "a language model"),
    ("vllm", "eagle3", PLAIN | {"architectures": ["Qwen3MoeForCausalLM"]}, FUSED, "", ""),
    ("vllm", "eagle", PLAIN | {"architectures": ["LlamaForCausalLMEagle"]}, FUSED, "", ""),
    ("sglang", "EAGLE", PLAIN, (), "", ""),
    ("sglang", "EAGLE", LLAMA | {"eagle_config": {"use_aux_hidden_state": False}}, FUSED, "", ""),
    ("vllm", "eagle", LLAMA, FUSED, "error", "eagle, at"),
    ("vllm", "eagle3", KIMI | {"model_type": "deepseek_v3"}, FUSED, "", ""),
    ("vllm", "eagle3", NESTED, FUSED, "", ""),
    ("vllm", "draft_model", PLAIN | {"vocab_size": 360}, LANGUAGE, "error", "360"),
    ("vllm", "draft_model", {"text_config": SIZES, "architectures": ["Qwen3VLForCausalLM"]}, LANGUAGE, "", ""),
]


def drafting(server, method, draft, **more):
    if server == "sglang":
        return [f"{SPECULATIVE}-algorithm={method}", f"{SPECULATIVE}-draft-model-path={draft}"]
    given = {"method": method, "model": str(draft), "num_speculative_tokens": 3} | more
    return ["--vllm-speculative-config", json.dumps({name: one for name, one in given.items() if one is not None})]


def save_names(path, config, names):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(1) for name in names}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(("server", "method", "config", "names", "severity", "words"), DRAFTS)
def test_a_draft_is_held_against_the_method_and_the_served_model(
    server, method, config, names, severity, words, releases, tmp_path
):
    draft = save_names(tmp_path / "draft", config, names)
    given = drafting(server, method, draft)
    report = preflight(hf_checkpoint=releases("qwen2-untied"), arguments=given)
    assert [one.severity for one in found(report, "CK745")] == ([severity] if severity else [])
    assert all(words in one.actual for one in found(report, "CK745"))
    if (server, config.get("vocab_size"), severity) == ("vllm", 360, "error"):
        given = drafting(server, method, draft, use_heterogeneous_vocab=True)
        assert found(preflight(hf_checkpoint=releases("qwen2-untied"), arguments=given), "CK745") == []


@pytest.mark.parametrize(
    ("method", "config", "severity"),
    [
        ("eagle3", LLAMA | {"n_predict": 3}, ""),
        ("mtp", PLAIN | {"n_predict": 1}, "warning"),
        ("draft_model", PLAIN, "error"),
        ("draft_model", PLAIN | {"architectures": ["Gemma4DSparkModel"]}, ""),
    ],
)
def test_vllm_takes_the_number_of_tokens_from_n_predict_alone(method, config, severity, releases, tmp_path):
    given = drafting("vllm", method, save_names(tmp_path / "draft", config, FUSED), num_speculative_tokens=None)
    report = preflight(hf_checkpoint=releases("qwen2-untied"), arguments=given)
    assert [one.severity for one in found(report, "CK745")] == ([severity] if severity else [])
