"""Training arguments from the YAML settings that Megatron-Bridge and NeMo 2 store next to the weights.

Source: Megatron-Bridge `training/checkpointing.py`, `models/gpt_provider.py` and `models/gpt/model_config.py`; NeMo
`lightning/io/pl.py`. The names in `_target_` are compared as text, and nothing is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptkit.converters.megatron.argument import Args, get
from ckptkit.converters.megatron.argument_table import ARGUMENTS
from ckptkit.core.errors import DamagedError
from ckptkit.formats import yaml_text
from ckptkit.formats.torch_save.records import Dtype
from ckptkit.storage.regular import read_regular

_AGAIN = "copy this file from the training run again"
RUN_CONFIG, NEMO_MODEL = "run_config.yaml", "model.yaml"
# A complete config has these keys. Without them, it is of a class with settings that ckptkit does not know.
_COMPLETE = {"num_layers", "normalization", "layernorm_epsilon", "gated_linear_unit"}
# Names of arguments in a config that differ from TransformerConfig's, which `ARGUMENTS` has.
_NAMES = {
    "use_rope_scaling": "rope_scaling",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
# Names without latent attention; its config uses the arguments' names.
_YARN = {"rotary_scaling_factor": "yarn_rotary_scaling_factor", "mscale": "yarn_mscale"} | {
    "mscale_all_dim": "yarn_mscale_all_dim"
}
_OF_RUN = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)


def stored_args(weights: Path, args: Args) -> Args:
    """`args` (Megatron-LM's), or if that is empty the arguments that follow from the run's YAML settings.

    Raises DamagedError for an unreadable file.
    """
    if args or (file := _settings_file(weights)) is None:
        return args
    settings = model_settings(file)
    return args_of(settings) if _COMPLETE.issubset(settings) else {}


def args_file(weights: Path, own: bool) -> Path:
    """The file that contains `stored_args`; `own`: whether Megatron-LM stored its arguments."""
    file = None if own else _settings_file(weights)
    return file or weights / "common.pt"


def _settings_file(weights: Path) -> Path | None:
    candidates = (weights / RUN_CONFIG, weights.parent / "context" / NEMO_MODEL)
    return next((file for file in candidates if file.is_file()), None)


def peft_settings(weights: Path) -> Mapping[str, Any] | None:
    """The adapter settings in a run's run_config.yaml (`dim`, `alpha`), or None if it trained no adapter.

    Raises DamagedError for an unreadable file.
    """
    file = weights / RUN_CONFIG
    content = _content(file) if file.is_file() else None
    settings = content.get("peft") if isinstance(content, dict) else None
    return settings if isinstance(settings, dict) else None


def _content(file: Path) -> Any:
    try:
        return yaml_text.values(yaml_text.parse(read_regular(file, yaml_text.MAX_BYTES).decode()))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{file} cannot be read: {error}", _AGAIN) from error


def model_settings(file: Path) -> Mapping[str, Any]:
    """The model settings in a run's YAML file, including those of its layers. Raises DamagedError."""
    content = _content(file)
    key = "config" if file.name == NEMO_MODEL else "model"
    model = content.get(key) if isinstance(content, dict) else None
    if not isinstance(model, dict):
        raise DamagedError(f"{file} has no object `{key}` of model settings", _AGAIN)
    # Since 2026 the settings of the layers are in a separate object.
    layers = model.get("transformer")
    return {**model, **layers} if isinstance(layers, dict) else model


def args_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron-LM's arguments for settings of TransformerConfig and of a GPTModel provider."""
    latent = "kv_lora_rank" in settings
    names = {row.name: row.config or row.name for row in ARGUMENTS} | _NAMES | ({} if latent else _YARN)
    args = {name: settings[config] for name, config in names.items() if config in settings}
    args |= {name: settings[name] for name in _OF_RUN if name in settings}
    activation, gated = _named(settings.get("activation_func")), get(settings, "gated_linear_unit", False)
    heads = settings.get("num_attention_heads")
    return args | {
        "swiglu": gated and activation in ("silu", "swish"),
        "squared_relu": activation == "squared_relu",
        "quick_geglu": gated and activation == "quick_gelu",
        "untie_embeddings_and_output_weights": not get(settings, "share_embeddings_and_output_weights", True),
        "group_query_attention": get(settings, "num_query_groups", heads) != heads,
        "vocab_size": None,
        "padded_vocab_size": _padded(settings),
        "params_dtype": Dtype(dtype) if (dtype := _named(settings.get("params_dtype"))) else None,
    }


def _named(value: object) -> str | None:
    """The last component of a name: `silu` for `_target_: torch.nn.functional.silu`."""
    name = value.get("_target_") if isinstance(value, dict) else value
    return name.rpartition(".")[2] if isinstance(name, str) else None


def _padded(settings: Mapping[str, Any]) -> int | None:
    """Rows of the vocabulary, padded for tensor parallel ranks if `should_pad_vocab` is set."""
    rows, multiple = settings.get("vocab_size"), get(settings, "make_vocab_size_divisible_by", 128)
    ranks = get(settings, "tensor_model_parallel_size", 1)
    if not (isinstance(rows, int) and isinstance(multiple, int) and isinstance(ranks, int)) or multiple * ranks < 1:
        return None
    return -(-rows // (multiple * ranks)) * multiple * ranks if settings.get("should_pad_vocab") else rows
