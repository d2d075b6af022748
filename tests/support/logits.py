"""What transformers computes of small models, for comparison with an engine's own forward pass."""

from dataclasses import replace

import torch
from families import HF_CASES
from families.case import save, tokens


def sized(name, sizes):
    case = HF_CASES[name]

    def config():
        found = case.config()
        text = getattr(found, "text_config", found)
        for key, size in sizes.items():
            setattr(text, key, size)
        return found

    return replace(case, config=config)


def saved_with_logits(name, case, path, length=16):
    """Saves the model in bfloat16. Its logits in float32 and in bfloat16, [2, 16, vocabulary].

    They are those of the last 16 of so many tokens.
    """
    model, _ = save(name, case, path, torch.bfloat16)
    with torch.no_grad():
        rounded = case.reference(model, tokens(length))[:, -16:].float()
        return case.reference(model.float(), tokens(length))[:, -16:].float(), rounded


def distance(logits, exact):
    return (logits[..., : exact.shape[-1]] - exact).abs().mean()


def summary(rows):
    """Mean and largest difference of an engine and of transformers in bfloat16 from float32, and the spread.

    A row is what the engine computed, or its last words, and transformers' logits in float32 and in bfloat16.
    """
    found = {}
    for name, (answer, exact, rounded) in rows.items():
        if isinstance(answer, str):
            found[name] = answer[-600:]
            continue
        ours, noise = ((one[..., : exact.shape[-1]] - exact).abs() for one in (answer, rounded))
        values = (ours.mean(), ours.max(), noise.mean(), noise.max(), exact.std())
        found[name] = [round(float(value), 5) for value in values]
    return found
