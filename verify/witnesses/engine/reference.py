"""transformers' log-probabilities for an engine's: `python -m verify.witnesses.engine.reference JOB.json`.

Runs the checkpoint, dequantized where it is quantized, in float32 and in the engine's own dtype. What the second
differs from the first is the noise of the format, against which the engine's answers are judged.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import View
from ckptkit.core.specs import summarize
from ckptkit.formats.detect import locate
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.hf.side_files import without_quantization
from converters.open import open_megatron
from converters.planner import to_hf
from verify.evidence.plain import plain
from verify.witnesses.ending import Phase, PhaseLog, ending_path
from verify.witnesses.engine.job import Judged

Ids = Sequence[Sequence[int]]
_ROOM_BYTES = 8 << 30  # attention and logits of the longest prompt


@dataclass(frozen=True)
class ReferenceJob:
    """`top_ids`: for each prompt and each position but the first, the tokens whose log-probabilities are wanted."""

    checkpoint: str
    report: str
    prompts: Ids
    top_ids: Sequence[Ids]

    def save(self, path: Path) -> None:
        """Writes the job as JSON."""
        path.write_text(json.dumps(asdict(self)))


def load_report(path: Path) -> Mapping[str, Sequence[Judged]]:
    """The answers by dtype, "float32" and another; `top_ids` of float32 are its own most probable tokens."""
    return {name: [Judged(**one) for one in answers] for name, answers in json.loads(path.read_text()).items()}


def run(job: ReferenceJob, phases: PhaseLog) -> None:
    """Computes and writes the answers. Raises CkptkitError where transformers would not hold the whole checkpoint."""
    found: dict[str, list[Any]] = {}
    checkpoint, home = as_hf(Path(job.checkpoint))
    for dtype in (torch.float32, dtype_of(checkpoint)):
        phases.enter(Phase("loading the checkpoint into transformers"))
        model = model_of(checkpoint, home, dtype)
        phases.enter(Phase("computing log-probabilities in transformers"))
        judged = (judge(model, prompt, ids) for prompt, ids in zip(job.prompts, job.top_ids, strict=True))
        found[str(dtype).removeprefix("torch.")] = [asdict(one) for one in judged]
        del model
    Path(job.report).write_text(json.dumps(found))


def as_hf(path: Path, hf: Path | None = None) -> tuple[HfCheckpoint | View, Path]:
    """The checkpoint as HF tensors that are not quantized, and the HF directory that has its config.

    `hf` is that directory for a Megatron checkpoint that has none beside it. Raises CkptkitError where the checkpoint
    cannot be opened, or is of a model or a format that is not supported.
    """
    location = locate(path)
    if location.kind == "hf":
        return plain(location.path), location.path
    megatron = open_megatron(location, hf)
    return to_hf(megatron, str(path)), megatron.hf_path


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
        model, info = architecture.from_pretrained(home, **options)
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
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
    normal = logits.log_softmax(-1)
    wanted = torch.tensor(top_ids, device=normal.device)
    own = normal.topk(min(wanted.shape[1], normal.shape[1])).indices
    return Judged(normal.gather(1, tokens[0, 1:, None])[:, 0].tolist(), own.tolist(), normal.gather(1, wanted).tolist())


def main() -> None:
    """Runs the job named on the command line."""
    job = ReferenceJob(**json.loads(Path(sys.argv[1]).read_text()))
    with PhaseLog(ending_path(Path(job.report))) as phases:
        run(job, phases)


if __name__ == "__main__":
    main()
