"""Runs the forward pass of SGLang's own multi-token prediction classes.

Only what needs a GPU is replaced: norms and linear layers by torch's, the decoder layer by transformers'. SGLang
decides the order in which a class joins embedding and hidden state, and for MiMo the names of weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from support.calls import call


@dataclass(frozen=True)
class Job:
    """A layer to run: `model` is a key of `MAKERS`, `config` a transformers config, `tensors` the layer's by HF name.

    `embedded` are the embeddings of the next tokens and `hidden` the hidden states, both [sequence, hidden].
    """

    model: str
    config: Any
    tensors: Mapping[str, Tensor]
    embedded: Tensor
    hidden: Tensor


def run(jobs):
    """Hidden states [sequence, hidden] behind each layer's last norm."""
    return call("sglang", _outputs, jobs)


class Block(nn.Module):
    """A decoder layer of transformers, called as SGLang calls its own, that leaves nothing for the residual."""

    def __init__(self, layer, rotary):
        super().__init__()
        self.layer = layer
        self.__dict__["rotary"] = rotary

    def forward(self, positions, hidden_states, forward_batch, residual):
        length = len(hidden_states)
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
        rotary = self.__dict__["rotary"](hidden_states[None], position_ids=positions[None])
        (result,) = self.layer(hidden_states[None], attention_mask=mask, position_embeddings=rotary)
        return result, torch.zeros_like(result)


class LastNorm(nn.RMSNorm):
    """SGLang's norms also take a residual and then return two tensors."""

    def forward(self, hidden, residual=None):
        return super().forward(hidden) if residual is None else (super().forward(hidden + residual), hidden)


def _mimo(config, tensors):
    from sglang.srt.models.mimo_mtp import MiMoMTP, MiMoMultiTokenPredictorLayer
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

    model = _bare(
        MiMoMultiTokenPredictorLayer, config, ("token_layernorm", "hidden_layernorm", "final_layernorm"), "input_proj"
    )
    model.mtp_block = Block(Qwen2DecoderLayer(config, 0), Qwen2RotaryEmbedding(config))
    names = {name: MiMoMTP.map_model_name_to_mtp_param_name(None, name).removeprefix("model.") for name in tensors}
    model.load_state_dict(
        {names[name].replace("mtp_block.", "mtp_block.layer."): tensor for name, tensor in tensors.items()}
    )
    return model


def _glm4_moe(config, tensors):
    from families.mtp import load_layer
    from sglang.srt.models.glm4_moe_nextn import Glm4MoeModelNextN
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRotaryEmbedding

    prefix = f"model.layers.{config.num_hidden_layers}."
    model = _bare(Glm4MoeModelNextN, config, ("enorm", "hnorm"), "eh_proj")
    model.shared_head = nn.Module()
    model.shared_head.norm = LastNorm(config.hidden_size, eps=config.rms_norm_eps)
    around = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
    model.load_state_dict({name: tensors[prefix + name] for name in around})
    layer = Glm4MoeDecoderLayer(config, config.num_hidden_layers)
    load_layer(layer, prefix, tensors)
    model.decoder = Block(layer, Glm4MoeRotaryEmbedding(config))
    return model


class QwenBody(nn.Module):
    """The decoder layer and the norm behind it, called as SGLang calls its whole model."""

    def __init__(self, block, norm):
        super().__init__()
        self.layers, self.norm = nn.ModuleList([block]), norm

    def forward(self, input_ids, positions, forward_batch, hidden_states):
        return self.norm(self.layers[0](positions, hidden_states, forward_batch, None)[0])


def _qwen(kind, config, tensors, block, norm):
    """SGLang's class with weights by their HF names; those of the decoder layer are in `block` already."""
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    model.config, model.enable_shared_expert_fusion = config, False
    model.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        setattr(model, name, norm(config.hidden_size, eps=config.rms_norm_eps))
    model.model = QwenBody(block, norm(config.hidden_size, eps=config.rms_norm_eps))
    model.lm_head, model.logits_processor = None, lambda input_ids, hidden, head, batch: hidden
    model.load_weights((name, tensor) for name, tensor in tensors.items() if not name.startswith("mtp.layers."))
    return model


def _qwen3_next(config, tensors):
    from sglang.srt.models.qwen3_next_mtp import Qwen3NextForCausalLMMTP as Kind
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    layer, rotary = theirs.Qwen3NextDecoderLayer, theirs.Qwen3NextRotaryEmbedding(config)
    return _qwen(Kind, config, tensors, Block(_loaded(layer, config, tensors), rotary), theirs.Qwen3NextRMSNorm)


def _qwen3_5(config, tensors):
    from sglang.srt.models.qwen3_5_mtp import Qwen3_5ForCausalLMMTP as Kind
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    text = config.text_config
    layer, rotary = theirs.Qwen3_5DecoderLayer, theirs.Qwen3_5TextRotaryEmbedding(text)
    return _qwen(Kind, text, tensors, Block(_loaded(layer, text, tensors), rotary), theirs.Qwen3_5RMSNorm)


def _loaded(kind, config, tensors):
    from families.mtp import load_layer

    layer = kind(config, config.num_hidden_layers - 1)
    load_layer(layer, "mtp.layers.0.", tensors)
    return layer


def _bare(kind, config, norms, projection):
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    for name in norms:
        setattr(model, name, LastNorm(config.hidden_size, eps=config.rms_norm_eps))
    setattr(model, projection, nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False))
    return model


MAKERS = {"mimo": _mimo, "glm4_moe": _glm4_moe, "qwen3_next": _qwen3_next, "qwen3_5": _qwen3_5}


def _output(job):
    model = MAKERS[job.model](job.config, job.tensors).eval()
    mode = SimpleNamespace(is_idle=lambda: False, is_extend=lambda: False)
    batch = SimpleNamespace(
        spec_info=SimpleNamespace(hidden_states=job.hidden), forward_mode=mode, mm_input_embeds=job.embedded.clone()
    )
    # From 1 on: SGLang's MiMo leaves out the embedding at position 0, which training does not.
    positions = torch.arange(1, len(job.hidden) + 1)
    # That of Qwen3.5 takes them from the batch, where a multimodal prompt has left them.
    embedded = None if job.model == "qwen3_5" else job.embedded.clone()
    return model(None, positions, batch, input_embeds=embedded)


def _outputs(jobs):
    with torch.no_grad():
        return [_output(job) for job in jobs]
