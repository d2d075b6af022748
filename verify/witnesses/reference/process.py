"""transformers' log-probabilities for a witness's: `python -m verify.witnesses.reference.process JOB.json`.

Runs the checkpoint, dequantized where it is quantized, in the witness's own dtype and in one that is more exact:
float32, or float64 for a witness that computes in float32. What the first differs from the second is the noise of the
format, against which the witness's answers are judged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import dtype_name
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import View
from ckptkit.core.specs import summarize
from ckptkit.formats.detect import locate
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.hf.side_files import without_quantization
from converters.open import open_megatron
from converters.planner import to_hf
from converters.registry import family_of
from quant.formats.floats.layout import E4M3
from verify.evidence.plain import plain
from verify.witnesses.process.entry import run_job
from verify.witnesses.process.exit_report import Phase, PhaseLog
from verify.witnesses.reference.activations import rounded_inputs
from verify.witnesses.reference.float64 import in_float64
from verify.witnesses.reference.job import SHORT, Answers, Continuation, Ids, Judged, Reference, ReferenceJob, Routed
from verify.witnesses.reference.logprobs import judged
from verify.witnesses.reference.prediction import predicted
from verify.witnesses.reference.teacher_forced import Decoder, Unseen, Values, compare, decoder_of, given_by, guided

_EXPERTS = re.compile(r"layers\.(\d+)\.\w+\.experts$")
LOAD = Phase("loading the checkpoint into transformers")
COMPUTE = Phase("computing log-probabilities in transformers")
_ROOM_BYTES = 8 << 30  # attention and logits of the longest prompt


def run(job: ReferenceJob, phases: PhaseLog) -> Reference:
    """Computes the answers. Raises CkptkitError where transformers would not hold the whole checkpoint."""
    checkpoint, home = as_hf(Path(job.checkpoint), Path(job.hf) if job.hf else None)
    dtype = getattr(torch, job.dtype) if job.dtype else dtype_of(checkpoint)
    if job.texts and not (job.prompts or job.openings):
        phases.enter(LOAD)
        model = model_of(checkpoint, home, dtype)
        phases.enter(COMPUTE)
        nothing = Answers([])
        return Reference(dtype_name(dtype), nothing, nothing, predicted=predicted(model, job.texts))
    given = given_by(job.streams, len(job.prompts))
    phases.enter(LOAD)
    model = model_of(checkpoint, home, torch.float32)
    decoder, unseen = _decoder(model) if job.streams else (None, None)
    phases.enter(COMPUTE)
    with in_float64(model, decoder.layers if decoder else ()) if dtype == torch.float32 else nullcontext():
        exact, sharp = _asked(model, job), _guided(model, decoder, job, given)
    texts = predicted(model, job.texts) if job.texts else None
    if dtype != torch.float32:
        del model, decoder
        phases.enter(LOAD)
        model = model_of(checkpoint, home, dtype)
        decoder, _ = _decoder(model) if job.streams else (None, None)
        phases.enter(COMPUTE)
    with nullcontext() if job.activations is None else rounded_inputs(model, in_fp8(home), job.activations):
        rounded, rough = _asked(model, job), _guided(model, decoder, job, given)
    seen = compare(given, sharp, rough, dtype) if sharp else []
    rounding = dtype_name(dtype) + (", inputs of layers in FP8" if job.activations is not None else "")
    return Reference(rounding, exact, rounded, seen, unseen, texts)


def _decoder(model: nn.Module) -> tuple[Decoder | None, str | None]:
    """The model's parts, or why they are not seen."""
    try:
        return decoder_of(model), None
    except Unseen as unseen:
        return None, str(unseen)


def _guided(
    model: nn.Module, decoder: Decoder | None, job: ReferenceJob, given: Sequence[Values]
) -> list[dict[str, Tensor]]:
    if decoder is None:
        return []
    return [guided(model, decoder, prompt, values) for prompt, values in zip(job.prompts, given, strict=True)]


def _asked(model: nn.Module, job: ReferenceJob) -> Answers:
    short = [prompt for prompt in job.prompts if len(prompt) <= SHORT] if job.routing else []
    return Answers(
        [judge(model, prompt, ids) for prompt, ids in zip(job.prompts, job.top_ids, strict=True)],
        [routed(model, prompt) for prompt in short],
        [score(model, opening, ids) for opening, ids in zip(job.openings, job.written, strict=True)],
        [write(model, opening, job.length) for opening in job.openings],
    )


def as_hf(path: Path, hf: Path | None = None) -> tuple[HfCheckpoint | View, Path]:
    """The checkpoint as HF tensors that are not quantized, and the HF directory that has its config.

    `hf` is that directory for a Megatron checkpoint that has none beside it. Raises CkptkitError where the checkpoint
    cannot be opened, or is of a model or a format that is not supported.
    """
    location = locate(path)
    if location.is_hf:
        return plain(location.path), location.path
    megatron = open_megatron(location, hf)
    return to_hf(megatron, str(path)), megatron.hf_path


def in_fp8(path: Path) -> list[str]:
    """The modules of an HF directory whose weights are stored in FP8."""
    specs = HfCheckpoint(path).specs.values()
    return [one.name.removesuffix(".weight") for one in specs if one.dtype == E4M3 and one.name.endswith(".weight")]


def dtype_of(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype in which an engine computes."""
    config = checkpoint.config
    return torch.float16 if (config.get("dtype") or config.get("torch_dtype")) == "float16" else torch.bfloat16


def model_of(checkpoint: HfCheckpoint | View, home: Path, dtype: torch.dtype) -> nn.Module:
    """The model of what `as_hf` gave, on the GPU where it fits there.

    Raises CkptkitError where transformers does not know the class or leaves parameters at random.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(home, trust_remote_code=False)
    for key, value in family_of(checkpoint.config).reference.items():
        setattr(config, key, value)
    name = (config.architectures or [""])[0]
    architecture = getattr(transformers, name, None)
    if architecture is None:
        raise CkptkitError(f"transformers has no class {name}", "there is no other reference for log-probabilities")
    options = {"dtype": dtype, "output_loading_info": True, "attn_implementation": "eager"}
    if isinstance(checkpoint, View):  # dequantized, or from Megatron
        config = type(config).from_dict(without_quantization(config.to_dict()))
        weights = {name: tensor for names in checkpoint.groups for name, tensor in checkpoint.read(names).items()}
        model, info = architecture.from_pretrained(None, config=config, state_dict=weights, **options)
    else:
        model, info = architecture.from_pretrained(home, config=config, **options)
    if missing := sorted(info["missing_keys"]):
        raise CkptkitError(
            f"transformers finds no tensor for {summarize(missing)}", "the checks of headers say what is missing"
        )
    size = sum(parameter.nbytes for parameter in model.parameters())
    if torch.cuda.is_available() and 1.2 * size + _ROOM_BYTES < torch.cuda.mem_get_info()[0]:
        model.cuda()
    found: nn.Module = model.eval()
    return found


def judge(model: nn.Module, prompt: Sequence[int], top_ids: Ids) -> Judged:
    """The prompt's log-probabilities, and at each position those of `top_ids` and the model's own best tokens."""
    tokens = torch.tensor([prompt], device=next(model.parameters()).device)
    with torch.no_grad():
        return judged(model(input_ids=tokens, use_cache=False).logits[0], prompt, top_ids)


def score(model: nn.Module, opening: Sequence[int], ids: Sequence[int]) -> list[float]:
    """The log-probability of each of `ids` after the opening and those before it."""
    tokens = torch.tensor([[*opening, *ids]], device=next(model.parameters()).device)
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits[0, len(opening) - 1 : -1].float()
    found = logits.log_softmax(-1).gather(1, tokens[0, len(opening) :, None])
    return [float(one) for one in found[:, 0]]


def write(model: nn.Module, opening: Sequence[int], length: int) -> Continuation:
    """The most probable token each time, at most `length` of them, until one ends the text."""
    import transformers

    ends = model.generation_config.eos_token_id  # type: ignore[union-attr]
    greedy = transformers.GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=ends, pad_token_id=0)
    tokens = torch.tensor([opening], device=next(model.parameters()).device)
    with torch.no_grad():
        written = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=greedy)  # type: ignore[operator]
    ids = [int(token) for token in written[0, len(opening) :]]
    return Continuation(ids, score(model, opening, ids))


def routed(model: nn.Module, prompt: Sequence[int]) -> Routed:
    """The experts of each token, by token and layer; transformers' modules called `experts` are given them as integers.

    Raises CkptkitError where no module is.
    """
    seen: dict[int, list[list[int]]] = {}
    hooks = [
        module.register_forward_pre_hook(partial(_see, seen, int(match[1])), with_kwargs=True)
        for name, module in model.named_modules()
        if (match := _EXPERTS.search(name))
    ]
    try:
        judge(model, prompt, [[0]] * (len(prompt) - 1))
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        raise CkptkitError("transformers shows no choice of experts in this model", "leave out --logits")
    return [
        [seen[layer][token] if layer in seen else [] for layer in range(max(seen) + 1)] for token in range(len(prompt))
    ]


def _see(
    seen: dict[int, list[list[int]]], layer: int, module: nn.Module, args: Sequence[Any], named: Mapping[str, Any]
) -> None:
    for given in (*args, *named.values()):
        if isinstance(given, Tensor) and given.dim() == 2 and given.dtype in (torch.int64, torch.int32):
            seen[layer] = given.tolist()


if __name__ == "__main__":
    run_job(ReferenceJob, run)
