"""Reports about draft models: what they lack, and what a launch or config.json says of them."""

import json

from mutations.edits import edit_config, edit_json, names, replace, tensor
from safetensors.torch import load_file, save_file
from support.drafts import KINDS, save_draft, tensors_of
from support.launch_scripts import write_headers

from reports.changes import on_checkpoint
from reports.launches import SCRIPT, VERL, launch, said
from reports.report import SOURCE, Case

_OPTIONS = (
    "--sglang-speculative-algorithm EAGLE3 --sglang-speculative-draft-model-path DRAFT "
    "--sglang-speculative-num-steps 3 --sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 4"
)


def _draft(kind, **config):
    return lambda work: save_draft(work / "CKPT", tensors_of(kind), KINDS[kind][0] | config)


def _headless(path):
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, {"format": "pt"})


def _saved(work, kind, **config):
    """A draft at `DRAFT` whose config.json has the sizes of Qwen2.5-7B, which the launches here serve."""
    sizes = {"hidden_size": 3584, "vocab_size": 152064}
    content = KINDS[kind][0] | sizes
    if inner := content.get("transformer_layer_config"):
        content["transformer_layer_config"] = inner | sizes
    save_draft(work / "DRAFT", tensors_of(kind), content | config)


def _drafting(options=_OPTIONS, kind="SpecForge", **config):
    def prepare(work):
        launch("qwen2")(work)
        _saved(work, kind, **config)
        said("--rollout-batch-size 32", f"--rollout-batch-size 32 {options}")(work)

    return prepare


def _vllm(*settings, kind="SpecForge", **config):
    def prepare(work):
        if not (work / "CKPT").exists():
            write_headers(work / "CKPT", "qwen2")
        _saved(work, kind, **config)
        at = "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"
        (work / "run.sh").write_text(VERL.rstrip() + "".join(f" {at}.{one}" for one in settings) + "\n")

    return prepare


def _bundled(work):
    """A served model whose config.json speaks of its own layers of DSpark."""
    _vllm("method=dspark", "num_speculative_tokens=5")(work)
    edit_config(work / "CKPT", dspark_block_size=5)


def _latent(work):
    tensors = tensors_of("latent attention")
    del tensors["embed_tokens.weight"]  # the target's
    save_draft(work / "CKPT", tensors, KINDS["latent attention"][0] | {"num_nextn_predict_layers": 0})


def _draft_says(**config):
    return lambda work: edit_config(work / "DRAFT", **config)


def _of_speculators(work):
    """The draft's config.json as speculators writes it: what the class of the layers needs is one level down."""
    file = work / "DRAFT" / "config.json"
    content = json.loads(file.read_text())
    content["transformer_layer_config"] = {key: content.pop(key) for key in ("model_type", "num_attention_heads")}
    kind = "dspark" if "DSpark" in content["architectures"][0] else "eagle3"
    file.write_text(json.dumps(content | {"speculators_model_type": kind}))


def _without_own_layer(path):
    replace(path, {}, names(path, ".layers.12."))


def _of_three_states(work):
    """A draft of speculators, with the target's own embedding."""
    tensors = tensors_of("speculators") | {"embed_tokens.weight": tensor(work / SOURCE, "model.embed_tokens.weight")}
    save_draft(work / "CKPT", tensors, KINDS["speculators"][0])


def _launched(prepare, damage, *names):
    """A launch with a draft model, and no checkpoint of its own."""
    return Case(names=names, damage=damage, prepare=prepare, twin=SCRIPT)


_THREE = "num_speculative_tokens=3"

CASES = {
    "sglang#27829": Case(
        "qwen3-untied/",
        ("draft_vocab_size is 352", "SGLang 0.5.16"),
        on_checkpoint(_headless),
        _draft("ModelOpt, all tokens"),
    ),
    "NeMo-RL#3960": Case(
        "qwen3-untied/",
        ("max_position_embeddings 256", "64"),
        on_checkpoint(lambda path: edit_config(path, max_position_embeddings=64)),
        _draft("SpecForge"),
        "ckptkit verify CKPT --source RELEASE",
    ),
    "sglang#21272": _launched(
        *(_drafting(), said("speculative-algorithm EAGLE3", "speculative-algorithm EAGLE")), "EAGLE3", "EAGLE, at"
    ),
    "sglang#24051": _launched(
        _drafting(_OPTIONS.replace("EAGLE3", "STANDALONE"), architectures=["LlamaForCausalLM"]),
        *(_draft_says(vocab_size=151936), "vocab_size 152064", "151936"),
    ),
    "sglang#33966": _launched(
        _drafting(_OPTIONS.replace("EAGLE3", "EAGLE"), "EAGLE"),
        *(_draft_says(architectures=["LlamaForCausalLM"]), "LlamaForCausalLM", "LlamaForCausalLMEagle"),
    ),
    "sglang#18216": _launched(_drafting(), _of_speculators, "speculators, without model_type"),
    "sglang#40630": _launched(
        _drafting(_OPTIONS.replace("EAGLE3", "DSPARK"), architectures=["Qwen3DSparkModel"]),
        *(_of_speculators, "DSPARK", "config.json of speculators"),
    ),
    "vllm#43369": _launched(
        _vllm("method=eagle3", "model=DRAFT", _THREE), _draft_says(vocab_size=201088), "vocab_size 152064", "201088"
    ),
    "vllm#49646": _launched(
        _vllm("method=dspark", "model=DRAFT", "num_speculative_tokens=7", architectures=["Qwen3DSparkModel"]),
        *(said("method=dspark", "method=dflash"), "Qwen3DSparkModel"),
    ),
    "vllm#44566": _launched(
        _vllm("method=eagle3", "model=DRAFT", _THREE, kind="speculators"),
        *(said(_THREE, "draft_tensor_parallel_size=1"), "num_speculative_tokens", "without it"),
    ),
    "vllm#55323": Case(
        "glm4_moe/hf",
        ("num_speculative_tokens", "mtp at"),
        said("num_speculative_tokens=1", "draft_tensor_parallel_size=1"),
        _vllm("method=mtp", "model=CKPT", "num_speculative_tokens=1"),
        SCRIPT,
    ),
    "vllm#35548": Case(
        "glm4_moe/hf", ("files",), on_checkpoint(_without_own_layer), _vllm("method=mtp", "num_speculative_tokens=1")
    ),
    "spark-vllm-docker#378": _launched(
        _bundled,
        on_checkpoint(lambda path: edit_json(path / "config.json", lambda one: one.pop("dspark_block_size"))),
        *("DSpark", "its config.json"),
    ),
    "sglang#26726": Case("qwen3-untied/", prepare=_latent),
    "sglang#21274": Case("qwen3-untied/", prepare=_draft("SpecForge")),
    "speculators#1065": Case(
        "qwen3-untied/",
        ("4 hidden states", "fc.weight", "[128, 384]"),
        on_checkpoint(lambda path: edit_config(path, eagle_aux_hidden_state_layer_ids=[2, 6, 9, 11])),
        _of_three_states,
    ),
}
