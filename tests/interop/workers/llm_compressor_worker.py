"""Runs llm-compressor in its environment: a checkpoint of each job, and what compressed-tensors unpacks from INT4.

The job file is a list of {"how": ..., "hf": DIR, "out": DIR to make, "unpacked": safetensors file to make, or none}.
"""

import json
import shutil
import sys
import time
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import model_free_ptq, oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

# Routers, embeddings and norms are not Linear modules; `lm_head` is.
IGNORE = ["lm_head"]
# For what sees tensors and no modules.
BY_NAME = [*IGNORE, "model.embed_tokens", "re:.*mlp.gate$"]
# Schemes that compressed-tensors has by name.
FLOATS = ("FP8_BLOCK", "FP8_DYNAMIC", "MXFP4A16", "NVFP4A16")


def weights(*, symmetric=True, actorder=None):
    """4 bits in groups of 32, which divide every width of the test models."""
    return QuantizationArgs(
        num_bits=4, type="int", strategy="group", group_size=32, symmetric=symmetric, actorder=actorder
    )


def groups(arguments):
    return {"group_0": QuantizationScheme(targets=["Linear"], weights=arguments)}


def from_model(hf, out, recipe):
    """With transformers' model, calibrated on 8 sequences of 32 tokens."""
    model = AutoModelForCausalLM.from_pretrained(hf, dtype="auto")
    tokens = torch.randint(0, model.config.vocab_size, (8, 32), generator=torch.Generator().manual_seed(0))
    data = Dataset.from_dict({"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()})
    # `oneshot` wants a tokenizer beside any data, also of tokens; the test models have none that can be read.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))
    calibration = {"dataset": data, "num_calibration_samples": 8, "max_seq_length": 32}
    oneshot(model=model, processor=tokenizer, recipe=recipe, **calibration)
    model.save_pretrained(out, save_compressed=True)
    for file in ("tokenizer_config.json", "tokenizer.model"):
        shutil.copy(Path(hf) / file, out)


def quantize(how, hf, out):
    if how in FLOATS:
        model_free_ptq(hf, out, scheme=how, ignore=BY_NAME, device="cpu")
    elif how == "model_free_ptq":
        scheme = QuantizationScheme(targets=["Linear"], weights=weights())
        model_free_ptq(hf, out, scheme=scheme, ignore=BY_NAME, device="cpu")
    elif how == "model_free_ptq, nothing ignored but lm_head":
        scheme = QuantizationScheme(targets=["Linear"], weights=weights())
        model_free_ptq(hf, out, scheme=scheme, ignore=IGNORE, device="cpu")
    elif how == "RTN":
        from_model(hf, out, QuantizationModifier(config_groups=groups(weights()), ignore=IGNORE))
    elif how == "RTN, asymmetric":
        from_model(hf, out, QuantizationModifier(config_groups=groups(weights(symmetric=False)), ignore=IGNORE))
    elif how == "GPTQ":
        from_model(hf, out, GPTQModifier(config_groups=groups(weights()), ignore=IGNORE))
    elif how == "GPTQ, by importance of columns":
        from_model(hf, out, GPTQModifier(config_groups=groups(weights(actorder="weight")), ignore=IGNORE))
    else:
        raise ValueError(how)


def unpack(out, file):
    """Writes what compressed-tensors makes of every packed weight, and all other tensors as they are."""
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    scheme = QuantizationScheme(
        **{key: value for key, value in group.items() if key in QuantizationScheme.model_fields}
    )
    tensors = {name: tensor for path in sorted(out.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    plain = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            parts = {
                part: tensors[f"{module}.{part}"]
                for part in ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
                if f"{module}.{part}" in tensors
            }
            plain[f"{module}.weight"] = compressor.decompress(parts, scheme)["weight"]
        elif kind not in {"weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"}:
            plain[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, file)


def main():
    jobs, results = Path(sys.argv[1]), []
    for job in json.loads(jobs.read_text()):
        start = time.monotonic()
        quantize(job["how"], job["hf"], job["out"])
        results.append({"quantize": time.monotonic() - start})
        if "unpacked" in job:
            unpack(Path(job["out"]), job["unpacked"])
    jobs.with_suffix(".results").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
