"""Wrong mappings, made from the right ones: whatever a family's rules are, each can be wrong in these ways."""

from itertools import combinations

import torch


def mutations(rules, hf):
    """Every (label, changed Megatron tensors by name), one mapping of the family at a time, from its HF tensors."""
    by_mapping = {}
    for rule in rules:
        by_mapping.setdefault(id(rule.mapping), []).append(rule)
    for group in by_mapping.values():
        for kind, changed in _of_one_mapping(group, hf):
            yield f"{group[0].mapping.megatron}: {kind}", changed


def _of_one_mapping(group, hf):
    op, layers = group[0].mapping.op, group[0].mapping.layers
    inputs = {rule.megatron: [hf[name] for name in rule.hf] for rule in group}
    right = {name: op.merge(tensors) for name, tensors in inputs.items()}
    yield "dropped", {name: torch.zeros_like(tensor) for name, tensor in right.items()}
    if any(tensor.shape[0] > 1 for tensor in right.values()):
        yield "rows reversed", {name: tensor.flip(0) for name, tensor in right.items()}
    if all(tensor.dim() == 2 and tensor.shape[1] % 2 == 0 for tensor in right.values()):
        yield (
            "column halves swapped",
            {name: tensor.roll(tensor.shape[1] // 2, dims=1) for name, tensor in right.items()},
        )
    shapes = [tensor.shape for tensor in next(iter(inputs.values()))]
    for one, other in combinations(range(len(shapes)), 2):
        if shapes[one] == shapes[other]:
            yield (
                f"inputs {one} and {other} swapped",
                {name: op.merge(_swapped(tensors, one, other)) for name, tensors in inputs.items()},
            )
    joined = {
        name: torch.cat(list(tensors)) for name, tensors in inputs.items() if all(tensor.dim() for tensor in tensors)
    }
    if joined and all(
        tensor.shape == right[name].shape and not torch.equal(tensor, right[name]) for name, tensor in joined.items()
    ):
        yield "inputs one above the other", joined
    if all(tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1] for tensor in right.values()):
        yield "transposed", {name: tensor.T.contiguous() for name, tensor in right.items()}
    count = len(layers) if layers is not None else 1
    experts = len(group) // count
    if count > 1:
        yield "off by one layer", _shifted(right, lambda index: (index + experts) % len(group))
    if experts > 1:
        yield "off by one expert", _shifted(right, lambda index: index - index % experts + (index + 1) % experts)


def _swapped(tensors, one, other):
    result = list(tensors)
    result[one], result[other] = result[other], result[one]
    return result


def _shifted(right, source):
    """Each tensor replaced by another of the mapping; rules are ordered by layer, then expert."""
    names = list(right)
    return {name: right[names[source(index)]] for index, name in enumerate(names)}
