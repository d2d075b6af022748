"""Looks into and changes what real Megatron saved in its legacy format, one file a rank."""

import warnings

import torch

FILE = "model_optim_rng.pt"


def rank_files(root):
    return {path.parent.name: path for path in sorted(root.rglob(FILE))}


def loaded(path):
    """What a rank saved. Its classes are Megatron's, whose import may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(torch.load(path, weights_only=False))


def rewrite(root, change, *names):
    for name, path in rank_files(root).items():
        if not names or name in names:
            state = loaded(path)
            change(state)
            torch.save(state, path)
