"""Folds names for a record: `python -m releases.fold config.json` prints those that transformers would save.

What transformers leaves out (draft layers, unknown vision towers, scales of a quantized release) is added by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_DOT = re.compile(r"(?<!\.)\.(?!\.)")  # not those of a range


def saved_by_transformers(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes that `save_pretrained` would write, without weights: tied tensors once, experts one by one."""
    fields = {
        key: value for key, value in config.items() if key not in ("model_type", "auto_map", "quantization_config")
    }
    parsed: Any = AutoConfig.for_model(config["model_type"], **fields)
    auto: Any = AutoModelForImageTextToText if "vision_config" in fields else AutoModelForCausalLM
    with torch.device("meta"):
        built = auto.from_config(parsed, attn_implementation="eager")
    tensors = dict(built.state_dict())
    for tied in (built._tied_weights_keys or {}) if parsed.tie_word_embeddings else ():
        del tensors[tied]
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(built, tensors).items()}


def folded(names: Iterable[str]) -> list[str]:
    """The shortest list of patterns that `releases.record.unfolded` turns into these names, by a simple rule."""
    numbers: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for name in names:
        numbers[_NUMBER.sub("#", name)].add(tuple(map(int, _NUMBER.findall(name))))
    lines = [_filled(template, box) for template, found in numbers.items() for box in _boxes(found)]
    for position in range(max(line.count(".") for line in lines) + 1):
        lines = _joined(lines, position)
    return sorted(lines)


def _boxes(tuples: set[tuple[int, ...]]) -> list[tuple[Sequence[int], ...]]:
    """Products of sets of numbers that together are `tuples`."""
    if not next(iter(tuples)):
        return [()]
    firsts: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for first, *rest in tuples:
        firsts[tuple(rest)].add(first)
    alike: dict[frozenset[int], set[tuple[int, ...]]] = defaultdict(set)
    for key, found in firsts.items():
        alike[frozenset(found)].add(key)
    return [(sorted(found), *box) for found, rests in alike.items() for box in _boxes(rests)]


def _filled(template: str, box: Sequence[Sequence[int]]) -> str:
    values = iter(box)
    return re.sub("#", lambda _: _braced(next(values)), template)


def _braced(numbers: Sequence[int]) -> str:
    """One number, `{3..63/4}` for equal steps, or runs: `{0..2,4..6}`."""
    if len(numbers) == 1:
        return str(numbers[0])
    steps = {after - before for before, after in pairwise(numbers)}
    if len(steps) == 1 and len(numbers) > 2:
        step = steps.pop()
        return f"{{{numbers[0]}..{numbers[-1]}{f'/{step}' if step > 1 else ''}}}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs) + "}"


def _joined(lines: Sequence[str], position: int) -> list[str]:
    """Lines that differ in the word at `position` alone, as one: `{gate_proj,up_proj}`."""
    words: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = defaultdict(list)
    kept = []
    for line in lines:
        parts = _DOT.split(line)
        if position < len(parts) and parts[position].isidentifier():
            words[tuple(parts[:position]), tuple(parts[position + 1 :])].append(parts[position])
        else:
            kept.append(line)
    return kept + [
        ".".join((*before, found[0] if len(found) == 1 else "{" + ",".join(sorted(found)) + "}", *after))
        for (before, after), found in words.items()
    ]


def main() -> None:
    """Prints the names of a record, by shape, for the config.json that is named."""
    by_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, shape in saved_by_transformers(json.loads(Path(sys.argv[1]).read_text())).items():
        by_shape[shape].append(name)
    print(
        json.dumps({"BF16 " + "x".join(map(str, shape)): folded(names) for shape, names in by_shape.items()}, indent=1)
    )


if __name__ == "__main__":
    main()
