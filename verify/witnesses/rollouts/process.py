"""Recorded responses and prompts again in transformers: `python -m verify.witnesses.rollouts.process JOB.json`.

Messages go through the tokenizer's own chat template, which transformers runs in a sandbox; text is tokenized as slime
and miles do it, without further special tokens. No code of the checkpoint is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import nn
from transformers import AutoTokenizer

from ckptkit.core.dtypes import dtype_name
from ckptkit.core.errors import CkptkitError, words_of
from verify.witnesses.process.entry import run_job
from verify.witnesses.process.exit_report import Phase, PhaseLog
from verify.witnesses.reference.process import as_hf, dtype_of, model_of
from verify.witnesses.rollouts.run import Part, Prompt, Recomputed, Rendering, RolloutJob

_ROWS = 256  # positions whose softmax over the vocabulary is in memory at once
_BEFORE = 12  # tokens of context before the first difference
# Options that a launch may give to the template and no file records (slime's --apply-chat-template-kwargs).
_UNRECORDED: tuple[Mapping[str, Any], ...] = (
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"thinking": True},
    {"thinking": False},
    {"add_generation_prompt": False},
    {"add_generation_prompt": False, "continue_final_message": True},
)


def run(job: RolloutJob, phases: PhaseLog) -> Recomputed:
    """Computes log-probabilities and renders prompts. Raises CkptkitError where transformers refuses the checkpoint."""
    return _render(job, phases) if job.prompts else _recompute(job, phases)


def _recompute(job: RolloutJob, phases: PhaseLog) -> Recomputed:
    checkpoint, home = as_hf(Path(job.checkpoint), Path(job.hf) if job.hf else None)
    found = []
    for dtype in (torch.float32, dtype_of(checkpoint)):
        phases.enter(Phase("loading the checkpoint into transformers"))
        model = model_of(checkpoint, home, dtype)
        phases.enter(Phase("computing log-probabilities in transformers"))
        found.append([log_probs(model, part) for part in job.parts])
        del model
    exact, rounded = found
    return Recomputed(dtype_name(dtype_of(checkpoint)), exact, rounded)


def log_probs(model: nn.Module, part: Part) -> list[float]:
    """Natural logarithms of the response tokens' probabilities, at the part's temperature."""
    tokens = torch.tensor([part.tokens], device=next(model.parameters()).device)
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0, part.first - 1 : -1]
    found: list[float] = []
    for at in range(0, len(logits), _ROWS):
        rows = (logits[at : at + _ROWS].float() / part.temperature).log_softmax(-1)
        found += rows.gather(-1, tokens[0, part.first :][at : at + _ROWS, None])[:, 0].tolist()
    return found


def _render(job: RolloutJob, phases: PhaseLog) -> Recomputed:
    phases.enter(Phase("loading the tokenizer"))
    tokenizer = AutoTokenizer.from_pretrained(job.checkpoint, trust_remote_code=False)
    if not tokenizer.chat_template and any(not isinstance(one.prompt, str) for one in job.prompts):
        raise CkptkitError(f"{job.checkpoint} has no chat template", "copy it from the release")
    phases.enter(Phase("rendering prompts"))
    return Recomputed(renderings=[_rendering(tokenizer, one) for one in job.prompts])


def _rendering(tokenizer: Any, asked: Prompt) -> Rendering:
    try:
        plain = _rendered(tokenizer, asked, {})
    except TemplateError as error:
        return Rendering(asked.index, refused=words_of(error))
    if plain == [*asked.tokens]:
        return Rendering(asked.index)
    for more in [{"add_special_tokens": True}] if isinstance(asked.prompt, str) else _UNRECORDED:
        try:
            if _rendered(tokenizer, asked, more) == [*asked.tokens]:
                return Rendering(asked.index, assumed=", ".join(f"{key}={value}" for key, value in more.items()))
        except (TemplateError, ValueError):
            continue  # a template may refuse an option, and transformers a last message that cannot be continued
    return Rendering(asked.index, different=_difference(tokenizer, asked.tokens, plain))


def _rendered(tokenizer: Any, asked: Prompt, more: Mapping[str, Any]) -> list[int]:
    """The token ids; `more` are options of the template, or of the encoding of a prompt that is text."""
    if isinstance(asked.prompt, str):
        return [*tokenizer.encode(asked.prompt, **{"add_special_tokens": False, **more})]
    options = {"add_generation_prompt": True, **asked.options, **more}
    text = tokenizer.apply_chat_template(list(asked.prompt), tokenize=False, **options)
    return [*tokenizer.encode(text, add_special_tokens=False)]


def _difference(tokenizer: Any, recorded: Sequence[int], rendered: Sequence[int]) -> str:
    pairs = enumerate(zip(rendered, recorded, strict=False))
    at = next((place for place, (one, other) in pairs if one != other), min(len(rendered), len(recorded)))
    before = tokenizer.decode(list(recorded[max(0, at - _BEFORE) : at]))[-200:]
    now, then = (
        f"{tokenizer.decode([ids[at]])!r} ({ids[at]})" if at < len(ids) else "the end" for ids in (rendered, recorded)
    )
    return f"{now} at token {at}, recorded {then} after {before!r}"


if __name__ == "__main__":
    run_job(RolloutJob, run)
