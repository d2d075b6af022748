"""What SGLang 0.5.16 and 0.5.23 make of each test model of `families`."""

import re

from families import HF_CASES, OF_A_KIND

from ckptkit.verify.witnesses.loading.job import EngineSizes
from support.installed import release
from support.models import UNREAD
from support.nightly import daily
from support.sglang_runs import LOST

# What SGLang says where it does not build a model on a machine without a GPU, or at all.
SAID = {
    "mimo": "does not recognize this architecture",  # its config class comes with the release, as code
    "mimo-tied-two-layers": "does not recognize this architecture",
    "bailing_moe": "does not recognize this architecture",  # as MiMo's
    "bailing_moe_v2-tied": "does not recognize this architecture",
    "qwen3_omni_moe_thinker": "Unrecognized configuration class",
    "kimi_k25": "'KimiK25VisionConfig' object has no attribute 'vt_hidden_size'",  # only a stub of a vision tower
    # Its config class takes neither spelling of rotary settings as transformers 5 wants them.
    "gemma3": "KeyError: 'vision_tower.embeddings.patch_embedding.weight'",  # transformers 5 names it so, no release
}
if release("sglang") < (0, 5, 23):
    SAID |= {
        "qwen3_5_text-tied": "Qwen3_5ForCausalLM has no SGlang implementation",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM has no SGlang implementation",
        "kimi_k3": "does not recognize this architecture",
        "glm5_next": "does not recognize this architecture",
    }
# What SGLang's class does not read of config.json, and so leaves out: tensors, of which and of how many.
LEFT_OUT = {
    # mlp_bias
    "llama-biases": ("model.layers.0.mlp.up_proj.bias", "load_weights no parameter", 36),
    # head_dim: it takes the hidden size divided by the heads
    "mixtral": ("model.layers.0.self_attn.q_proj.weight", "15360 40960", 48),
    "qwen2_moe": ("model.layers.0.self_attn.q_proj.weight", "15360 40960", 84),
    # decoder_sparse_step, mlp_only_layers
    "qwen2_moe-dense-between": ("model.layers.0.mlp.up_proj.weight", "load_weights no parameter", 105),
    "qwen3_moe-dense-between": ("model.layers.0.mlp.up_proj.weight", "load_weights no parameter", 27),
}
# What SGLang's own loader raises where experts are shared out between two ranks.
_NOT_SHARED_OUT = "The size of tensor a (6) must match the size of tensor b (12) at non-singleton dimension 0"
REFUSED_IN_PARALLEL = {EngineSizes(2, 2): dict.fromkeys(("gpt_oss", "gpt_oss-v4"), _NOT_SHARED_OUT)}
EXPERT = re.compile(
    r"layers\.3\.((\w+\.)?experts\.([45]\.|gate_up_proj|down_proj)|block_sparse_moe\.(in|out)put_linear\.weight)"
)
# Models whose class stops where a parameter was not loaded, so that nothing more is seen.
STRICT = ("step3p5", "step3p7")
# The class that SGLang makes of a model's multi-token prediction layers.
DRAFTS = {
    "glm4_moe-mtp": "Glm4MoeForCausalLMNextN",
    **dict.fromkeys(("deepseek_v3", "deepseek_v32"), "DeepseekV3ForCausalLMNextN"),
    **dict.fromkeys(("glm_moe_dsa", "glm_moe_dsa-shared"), "GlmMoeDsaForCausalLMNextN"),
    "glm4_moe_lite": "Glm4MoeLiteForCausalLMNextN",
    "hy_v3": "HYV3ForCausalLMNextN",
    "qwen3_next": "Qwen3NextForCausalLMMTP",
    "qwen3_5": "Qwen3_5ForCausalLMMTP",
    "qwen3_5_moe": "Qwen3_5ForCausalLMMTP",
    "nemotron_h-latent": "NemotronHForCausalLMMTP",
    "deepseek_v4": "DeepseekV4ForCausalLMNextN",
}
if release("sglang") >= (0, 5, 23):
    DRAFTS |= {"qwen3_5_moe_text": "Qwen3_5ForCausalLMMTP", "glm5_next": "Glm5NextForConditionalGenerationNextN"}
# What is said where no draft model is built.
NO_DRAFT = dict.fromkeys(("step3p5", "step3p7"), "Step3p5MTP")
OF_DRAFT = re.compile(r"model\.(language_model\.)?layers\.12\..*|mtp\..*")
EXPERT_OF_DRAFT = re.compile(
    r"(model\.(language_model\.)?layers\.12\.mlp|mtp\.layers\.0\.mlp|mtp\.layers\.1\.mixer|mtp\.0\.ffn)\.experts\.[45]\..*"
)
# Parameters that SGLang computes of what it is given: -exp(A_log).
COMPUTED = dict.fromkeys(
    ("nemotron_h", "nemotron_h-latent"), tuple(f"model.layers.{layer}.mixer.A" for layer in (0, 4, 8, 12))
)
CLEAN = [name for name in HF_CASES if name not in SAID and name not in LEFT_OUT]


def of_a_kind(names):
    """By day those that are like no other."""
    return daily(names, [name for name in names if name in OF_A_KIND])


def unread(name, tensors, report):
    """The tensors that an engine's class leaves aside: of a draft model, and those of `UNREAD`."""
    starts = UNREAD.get(name, ())
    return {one for one in tensors if one in report.draft or one.startswith(starts) or "rotary_emb.inv_freq" in one}


def holds_draft(draft, tensors):
    """Asserts that a draft model holds all of its tensors."""
    assert (draft.unwritten, draft.dropped, draft.differing, draft.routers, draft.computed) == ((), (), (), (), ())
    assert draft.equal == {one: tensor.nbytes for one, tensor in tensors.items() if OF_DRAFT.fullmatch(one)}


def names_faults(report, tensors, lost=LOST):
    """Asserts that a report of `lost_and_exchanged` names what is missing, and the experts that were exchanged.

    With LOST_OF_DRAFT it is that of a draft model.
    """
    exchanged = EXPERT.search if lost is LOST else EXPERT_OF_DRAFT.fullmatch
    missing = {one for one in tensors if lost.fullmatch(one)}
    assert {one.tensor for one in report.unwritten} == missing
    assert {one.tensor for one in report.dropped} == missing
    assert {one.tensor for one in report.differing} == {one for one in tensors if exchanged(one)}
