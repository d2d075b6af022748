"""transformers' log-probabilities for a witness's: `python -m ckptkit.verify.witnesses.reference.process JOB.json`.

Runs the checkpoint, dequantized if it is quantized, in an engine's dtype and in float32. The difference of these two is
the noise of the dtype, with which the answers of a witness are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from ckptkit.converters.open import open_megatron
from ckptkit.converters.planner import to_hf
from ckptkit.core.dtypes import dtype_name
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import View
from ckptkit.core.specs import summarize
from ckptkit.formats.detect import locate
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.hf.side_files import without_quantization
from ckptkit.quant.engines.transformers_class import SETTINGS
from ckptkit.quant.formats.floats.layout import E4M3
from ckptkit.verify.evidence.plain import plain
from ckptkit.verify.witnesses.process.exit_report import ExitReport, Phase, run_job
from ckptkit.verify.witnesses.reference.activations import rounded_inputs
from ckptkit.verify.witnesses.reference.job import Ids, Judged, Reference, ReferenceJob, judged_logits
from ckptkit.verify.witnesses.reference.prediction import predicted

LOAD = Phase("loading the checkpoint into transformers")
COMPUTE = Phase("computing log-probabilities in transformers")
_ROOM_BYTES = 8 << 30  # attention and logits of the longest prompt


def run(job: ReferenceJob, phases: ExitReport) -> Reference:
    """Computes the answers. Raises CkptkitError if transformers would not hold the complete checkpoint."""
    checkpoint, home = as_hf(job.checkpoint, job.hf)
    stored = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    # Without a dtype an engine's.
    dtype = getattr(torch, job.dtype or ("float16" if stored == "float16" else "bfloat16"))
    if job.texts and not job.prompts:
        phases.enter(LOAD)
        model = reference_model(checkpoint, home, dtype)
        phases.enter(COMPUTE)
        return Reference(dtype_name(dtype), [], [], predicted=predicted(model, job.texts))
    phases.enter(LOAD)
    model = reference_model(checkpoint, home, torch.float32)
    phases.enter(COMPUTE)
    exact = _judge_prompts(model, job)
    texts = predicted(model, job.texts) if job.texts else None
    del model
    phases.enter(LOAD)
    model = reference_model(checkpoint, home, dtype)
    phases.enter(COMPUTE)
    with nullcontext() if job.activations is None else rounded_inputs(model, in_fp8(home), job.activations):
        rounded = _judge_prompts(model, job)
    rounding = dtype_name(dtype) + (", inputs of layers in FP8" if job.activations is not None else "")
    return Reference(rounding, exact, rounded, texts)


def _judge_prompts(model: nn.Module, job: ReferenceJob) -> Sequence[Judged]:
    prompts = zip(job.prompts, job.top_ids, job.temperatures or [1.0] * len(job.prompts), strict=True)
    return [judge_prompt(model, *prompt) for prompt in prompts]


def as_hf(path: Path, hf: Path | None = None) -> tuple[HfCheckpoint | View, Path]:
    """The checkpoint as unquantized HF tensors, and the HF directory with its config, which may be `hf`."""
    location = locate(path)
    if location.kind == "hf":
        return plain(location.path), location.path
    megatron = open_megatron(location, hf)
    return to_hf(megatron, str(path)), megatron.hf_path


def in_fp8(path: Path) -> list[str]:
    specs = HfCheckpoint(path).specs.values()
    return [one.name.removesuffix(".weight") for one in specs if one.dtype == E4M3 and one.name.endswith(".weight")]


def reference_model(checkpoint: HfCheckpoint | View, home: Path, dtype: torch.dtype) -> nn.Module:
    """The model, on the GPU if it fits. Raises CkptkitError for an unknown class or uninitialized parameters."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(home, trust_remote_code=False)
    for key, value in SETTINGS.get(str(checkpoint.config.get("model_type")), {}).items():
        setattr(config, key, value)
    name = (config.architectures or [""])[0]
    architecture = getattr(transformers, name, None)
    if architecture is None:
        raise CkptkitError(f"transformers has no class {name}, the only reference", "leave out --logits")
    options = {"dtype": dtype, "output_loading_info": True, "attn_implementation": "eager"}
    if isinstance(checkpoint, View):  # dequantized, or from Megatron
        config = type(config).from_dict(without_quantization(config.to_dict()))
        weights = {name: tensor for names in checkpoint.groups for name, tensor in checkpoint.read(names).items()}
        model, info = architecture.from_pretrained(None, config=config, state_dict=weights, **options)
    else:
        model, info = architecture.from_pretrained(home, config=config, **options)
    if missing := sorted(info["missing_keys"]):
        raise CkptkitError(f"transformers finds no tensor for {summarize(missing)}", "restore these tensors")
    size = sum(parameter.nbytes for parameter in model.parameters())
    if torch.cuda.is_available() and 1.2 * size + _ROOM_BYTES < torch.cuda.mem_get_info()[0]:
        model.cuda()
    reference: nn.Module = model.eval()
    return reference


def judge_prompt(model: nn.Module, prompt: Sequence[int], top_ids: Ids, temperature: float = 1) -> Judged:
    """The prompt's log-probabilities, and at each position those of `top_ids` and the model's own best tokens."""
    tokens = torch.tensor([prompt], device=next(model.parameters()).device)
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0]
        return judged_logits(logits if temperature == 1 else logits.float() / temperature, prompt, top_ids)


if __name__ == "__main__":
    run_job(ReferenceJob, run)
