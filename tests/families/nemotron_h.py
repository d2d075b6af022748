"""Nemotron-H: layers that are a Mamba-2 mixer, attention, an MLP without a gate, or experts.

transformers leaves MTP layers out. The reference for them is transformers' blocks in the equations of `families.mtp`,
with the projection that takes [embedding, hidden state], as SGLang's `NemotronHForCausalLMMTP` has it.
"""

import torch
from torch import nn
from transformers import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock

from families.case import MOE, SIZES, Case, biases_in_float32, mixer_value
from families.mtp import causal_mask, next_tokens, rms_norm

# Experts in the layers in which tests lose and exchange some.
PATTERN = "M*-EM*EEM-*EM"
# Heads, groups and sizes of the mixer all differ, as those of attention and experts do.
BLOCKS = {
    "mamba_num_heads": 12,
    "mamba_head_dim": 20,
    "n_groups": 4,
    "ssm_state_size": 18,
    "chunk_size": 16,
    "n_routed_experts": 12,
    "moe_shared_expert_intermediate_size": 72,
    "routed_scaling_factor": 2.5,
    # Kernels of a GPU, which transformers would download.
    "use_mamba_kernels": False,
}
WORDS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}


def sizes():
    """Sizes of a model, whose number of layers is that of its pattern."""
    return {key: size for key, size in SIZES.items() if key != "num_hidden_layers"} | MOE | BLOCKS


def value(name, tensor, dtype):
    """As `mixer_value`, with every block strong enough to show."""
    if name.endswith(".D"):
        return (1 + 0.3 * torch.randn(tensor.shape)).to(dtype)
    result = mixer_value(name, tensor, dtype)
    if name.endswith(("A_log", "dt_bias")):
        return result
    if "conv1d" in name:
        return result * 20
    if name.startswith("mtp.") and "norm" not in name:
        result = result * 3
    return result if "norm" in name or name.endswith("e_score_correction_bias") else result * 3


# As transformers 5.12 saves it; the releases and later transformers have the other.
RENAMED = {"backbone.embedding.weight": "backbone.embeddings.weight"}


def as_released(config):
    """config.json with the key that SGLang reads the groups of mixers from."""
    return config | {"mamba_n_groups": config["n_groups"]}


def as_letters(config):
    """As Nano and Super name the layers: by a string."""
    kinds = {word: letter for letter, word in WORDS.items()}
    words = config.pop("layers_block_type")
    config.pop("mtp_layers_block_type")
    letters = "".join(map(kinds.__getitem__, words))
    return as_released({**config, "num_hidden_layers": len(words), "hybrid_override_pattern": letters})


MTP = ("attention", "moe")


def blocks(model):
    """The blocks of the MTP layer, as the model's own layers of their kinds are built."""
    return [NemotronHBlock(model.config, model.config.layers_block_type.index(kind)).eval() for kind in MTP]


def added_mtp(model, dtype):
    """The tensors of an MTP layer, whose blocks are numbered from 0."""
    hidden = model.config.hidden_size
    found = {f"mtp.layers.0.{name}.weight": torch.empty(hidden) for name in ("enorm", "hnorm")}
    found |= {"mtp.layers.0.eh_proj.weight": torch.empty(hidden, 2 * hidden)}
    found |= {f"mtp.layers.{len(MTP) - 1}.final_layernorm.weight": torch.empty(hidden)}
    for place, block in enumerate(blocks(model)):
        for name, tensor in block.state_dict().items():
            stem, _, leaf = f"mtp.layers.{place}.{name}".rpartition(".")
            each = {f"{stem}.{expert}.{leaf}.weight": part for expert, part in enumerate(tensor)}
            found |= each if stem.endswith(".experts") else {f"{stem}.{leaf}": tensor}
    return {name: biases_in_float32(name, value(name, tensor, dtype)) for name, tensor in found.items()}


def mtp_logits(model, added, tokens):
    """Logits of the MTP layer by the equations of `families.mtp`."""
    eps, count = model.config.layer_norm_epsilon, len(MTP)
    hidden = rms_norm(model.model(tokens).last_hidden_state, added["mtp.layers.0.hnorm.weight"], eps)
    embedded = rms_norm(model.model.embeddings(next_tokens(tokens)), added["mtp.layers.0.enorm.weight"], eps)
    stream = nn.functional.linear(torch.cat([embedded, hidden], dim=-1), added["mtp.layers.0.eh_proj.weight"])
    for place, block in enumerate(blocks(model)):
        state = {}
        for name, tensor in block.state_dict().items():
            stem, _, leaf = f"mtp.layers.{place}.{name}".rpartition(".")
            each = (added.get(f"{stem}.{expert}.{leaf}.weight") for expert in range(len(tensor)))
            state[name] = torch.stack([*each]) if stem.endswith(".experts") else added[f"{stem}.{leaf}"]
        block.load_state_dict(state)
        stream = block(stream, attention_mask=causal_mask(stream))
    normed = rms_norm(stream, added[f"mtp.layers.{count - 1}.final_layernorm.weight"], eps)
    return nn.functional.linear(normed, model.lm_head.weight)


def layers(pattern):
    """The words for a pattern of letters."""
    return [WORDS[letter] for letter in pattern]


CASES = {
    "nemotron_h": Case(
        lambda: NemotronHConfig(**sizes(), layers_block_type=layers(PATTERN)),
        edit=as_letters,
        value=value,
        stored=biases_in_float32,
        renamed=RENAMED,
    ),
    # As Ultra has it: experts in a smaller size, an MTP layer, and no num_hidden_layers.
    "nemotron_h-latent": Case(
        lambda: NemotronHConfig(
            **sizes(), layers_block_type=layers(PATTERN), moe_latent_size=80, num_nextn_predict_layers=1
        ),
        added=added_mtp,
        edit=as_released,
        value=value,
        stored=biases_in_float32,
        renamed=RENAMED,
        mtp=mtp_logits,
        since=(0, 17),  # before, MambaModel has no MTP layers
    ),
}
