"""Loads draft models into an engine's own classes: `python draft_classes.py ENGINE TARGET OUTPUT DRAFT...`.

OUTPUT gets JSON: for each draft what its class left unwritten of its parameters, which were poisoned before, and where
each tensor went; or what the engine refused.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import torch

from ckptkit.verify.witnesses.loading.bits import difference, poison, poisoned
from ckptkit.verify.witnesses.loading.engine import ModelBuild
from ckptkit.verify.witnesses.loading.placement import Placement, flat_elements
from ckptkit.verify.witnesses.loading.trace import Trace
from ckptkit.verify.witnesses.process.exit_report import ExitReport
from support.processes import end_now

SCRATCH = Path(mkdtemp(prefix="drafts-"))


class Seen:
    def __init__(self, engine):
        self.engine, self.held = engine, dict[str, Any]()

    def __call__(self, model, weights, device):
        before = {name: one.detach() for name, one in model.state_dict(keep_vars=True).items()}
        poison(one for name, one in before.items() if not self.engine.FACTS.has_default(name))
        given = {}

        def noted():
            for name, one in weights:
                given[name] = one
                yield name, one

        with Trace(before.values()) as trace:
            model.load_weights(trace.feed(noted()))
        after = {name: one.detach() for name, one in model.state_dict(keep_vars=True).items()}
        pieces = Placement.of(trace, after).pieces
        wrong = [
            name
            for name, found in pieces.items()
            for piece in found
            if difference(piece.actual(after[piece.param]), piece.cast(piece.taken(given[name])))
        ]
        self.held = {
            "class": type(model).__name__,
            "unwritten": sorted(name for name, one in after.items() if bool(poisoned(flat_elements(one)).any())),
            "places": {name: sorted({piece.param for piece in pieces.get(name, ())}) for name in given},
            "wrong": sorted(set(wrong)),
            "tokens": tokens_of(model),
        }


def tokens_of(model):
    """The target's tokens that the engine takes the draft's for, as it computes them."""
    if (hot := getattr(model, "hot_token_id", None)) is not None:
        return [int(one) for one in hot]
    if (shift := getattr(model, "draft_id_to_target_id", None)) is not None:
        return [int(one) for one in torch.arange(shift.numel()) + shift]
    return None


def load(name, target, draft, phases):
    engine = import_module(f"ckptkit.verify.witnesses.{name}.adapter")
    seen = Seen(engine)
    if name == "sglang":
        engine.build(ModelBuild(draft, SCRATCH), seen, phases)
        return seen.held
    import_module("ckptkit.verify.witnesses.vllm.platform").choose_platform(SCRATCH)  # before anything of vLLM
    from vllm.engine import arg_utils

    method = "eagle3" if "eagle3" in (draft / "config.json").read_text().lower() else "eagle"
    original = arg_utils.EngineArgs

    def with_draft(**given):
        return original(
            **given | {"speculative_config": {"method": method, "model": str(draft), "num_speculative_tokens": 1}}
        )

    with patch.object(arg_utils, "EngineArgs", with_draft):
        engine.build(ModelBuild(target, SCRATCH, draft=True), seen, phases)
    return seen.held


def main():
    name, target, output, *drafts = sys.argv[1:]
    found = {}
    for draft in drafts:
        try:
            found[draft] = load(name, Path(target), Path(draft), ExitReport(SCRATCH / "report"))
        except Exception as error:  # noqa: BLE001 - what an engine refuses is what is asked
            found[draft] = {"refused": f"{type(error).__name__}: {error}"}
    Path(output).write_text(json.dumps(found))
    end_now()


if __name__ == "__main__":
    main()
