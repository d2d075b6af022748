"""What can go wrong between a trainer and its engine, as changes of what is sent; one table for every engine."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor

from ckptkit import CkptkitError
from support import models

LAYER, NEXT = 3, 4
SLEEP = "sleep level 2"  # the step that loses weights without an update
Pair = tuple[str, Tensor]
# What becomes of a tensor on its way; None: it is dropped.
Change = Callable[[str, Tensor], Pair | None]


@dataclass(frozen=True)
class Fault:
    """`named`: what a finding must name, in the engine's words. `again`: the values are those of the update before.

    `unrecorded`: the trainer does not know that it should send what is dropped.
    """

    change: Change
    named: str
    again: bool = False
    unrecorded: bool = False

    def touches(self, tensors):
        return any(pair is None or pair[0] != name or pair[1] is not one for name, one, pair in self._changed(tensors))

    def arrived(self, sent):
        return dict(pair for _, _, pair in self._changed(sent) if pair is not None)

    def _changed(self, tensors):
        return ((name, one, self.change(name, one)) for name, one in tensors.items())


def dropping(pattern):
    return lambda name, tensor: None if re.search(pattern, name) else (name, tensor)


def exchanging(pattern, one, other):
    names = {one: other, other: one}

    def change(name, tensor):
        moved = re.sub(f"{re.escape(one)}|{re.escape(other)}", lambda part: names[part[0]], name)
        return moved if re.search(pattern, name) else name, tensor

    return change


def altering(pattern, alter):
    return lambda name, tensor: (name, alter(tensor) if re.search(pattern, name) else tensor)


_HERE = rf"layers\.{LAYER}\."
_BOTH = rf"layers\.({LAYER}|{NEXT})\."
_EXPERT = rf"{_HERE}mlp\.experts"
_EXPERTS = rf"{_EXPERT}\.(routed_experts\.)?w"
_BIAS = r"mlp\.gate\.e_score"
_OUTPUT = r"self_attn\.o_proj\.weight"

FAULTS = {
    "a bucket dropped": Fault(dropping(rf"layers\.{NEXT}\."), rf"layers\.{NEXT}\."),
    "up without gate": Fault(
        dropping(rf"{_HERE}mlp\.(experts\.2\.)?gate_proj\.weight$"), rf"{_HERE}mlp\.(gate_up_proj|experts\.(\w+\.)?w13)"
    ),
    "attention without its last part": Fault(
        dropping(rf"{_HERE}self_attn\.(v_proj|kv_a_proj_with_mqa)\.weight$"),
        rf"{_HERE}self_attn\.(qkv_proj|fused_qkv_a_proj)",
    ),
    "the last norm not sent": Fault(dropping(r"^model\.norm\.weight$"), r"(^|[ .])norm\.weight"),
    "embeddings not sent": Fault(dropping(r"embed_tokens"), r"embed_tokens\.weight"),
    "the output layer under the embeddings' name": Fault(dropping(r"lm_head"), r"lm_head\.weight", unrecorded=True),
    "a router not sent": Fault(dropping(rf"{_HERE}mlp\.gate\.weight"), rf"{_HERE}mlp\.gate\.weight"),
    "a router's bias rounded": Fault(
        altering(_HERE + _BIAS, lambda bias: bias.bfloat16().to(bias.dtype)), _HERE + _BIAS
    ),
    "experts exchanged": Fault(
        exchanging(rf"{_EXPERT}\.\d+\.up_proj", "experts.2.", "experts.5."), _EXPERTS, again=True
    ),
    "a scale halved": Fault(
        altering(rf"{_EXPERT}\.2\.down_proj\.weight_scale", lambda scale: scale / 2), _EXPERTS, again=True
    ),
    "a matrix transposed": Fault(
        altering(_HERE + _OUTPUT, lambda one: one.T.contiguous() if one.shape[0] == one.shape[1] else one),
        _HERE + _OUTPUT,
    ),
    "layers exchanged": Fault(
        exchanging(rf"{_BOTH}input_layernorm", f"layers.{LAYER}.", f"layers.{NEXT}."), r"input_layernorm\.weight"
    ),
    "a second update that is not the first": Fault(
        altering(_HERE + _OUTPUT, lambda one: one * 2), _HERE + _OUTPUT, again=True
    ),
    "a delta swallowed": Fault(dropping(""), "embed_tokens"),
}


def faults_of(tensors):
    return {name: fault for name, fault in FAULTS.items() if fault.touches(tensors)}


@dataclass(frozen=True)
class Update:
    step: str
    version: int
    fault: Fault | None = None

    def recorded(self, tensors):
        whole = weights(tensors, self.version)
        return self.fault.arrived(whole) if self.fault and self.fault.unrecorded else whole

    def arrived(self, tensors):
        whole = weights(tensors, self.version)
        return self.fault.arrived(whole) if self.fault else whole


def updates(tensors):
    """Two sound updates, the second once more, and each fault with a sound one after it."""
    yield from (Update("1", 1), Update("2", 2), Update("2 again", 2))
    version = 2
    for name, fault in faults_of(tensors).items():
        version += not fault.again
        yield Update(name, version, fault)
        version += 1
        yield Update(f"after {name}", version)


def weights(tensors, version):
    """What a trainer holds after this many steps; packed words change their places."""
    return {name: _stepped(name, one, version) for name, one in tensors.items()}


def _stepped(name, one, version):
    if one.is_floating_point():
        return (one.float() * (1 + version / 64)).to(one.dtype)
    return one if name.endswith("weight_shape") else one.roll(version, 0)


@cache
def tensors_of(path):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {name: one.to(device) for name, one in models.tensors(path).items()}


def outcome(check, version=None):
    return _said(lambda: asdict(check.after_update(version)))


def _said(act):
    try:
        return {"raised": "", **act()}
    except CkptkitError as error:
        return {"raised": error.message, "details": list(error.details)}


def checked(check, tensors, deliver, *, versions=False):
    """Does every update, and yields what the check says of each. `versions`: the engine is given a number each time."""
    for number, update in enumerate(updates(tensors), 1):
        deliver(update.arrived(tensors), number)
        for name, tensor in update.recorded(tensors).items():
            check.record(name, tensor)
        yield update.step, outcome(check, number if versions else None)


def lost(check):
    return _said(lambda: {"compared": check.after_resume()})


def mistakes(found, tensors):
    wrong = []
    for update in updates(tensors):
        said = found.get(update.step, {"raised": "it was not reached", "details": []})
        lines = [said["raised"], *said.get("details", [])]
        sound = not said["raised"] if update.fault is None else any(re.search(update.fault.named, one) for one in lines)
        if not sound:
            wrong.append(f"{update.step}: {json.dumps(said)[:1500]}")
    return wrong
