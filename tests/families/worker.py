"""What real Megatron, in a process of its own, computes of one test model."""

import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from support.forking import run_module
from torch import Tensor

from families.case import far


@dataclass(frozen=True)
class Answer:
    """Logits that Megatron computed from a checkpoint that it loaded strictly, and from every wrong mapping of it.

    `mtp` are those of all multi-token prediction layers [layers x batch, sequence, vocabulary], or None.
    `missing` and `unexpected` are key names, as Megatron's strict load reports them.
    `mutated` gives the largest change of any logit for each wrong mapping, relative to the largest logit. A mapping is
    made wrong in the last of its layers, and where that changes them no more than was asked for, in all.
    """

    logits: Tensor
    mtp: Tensor | None
    missing: list[str]
    unexpected: list[str]
    mutated: dict[str, float]


def ask(hf, megatron, tokens, enough):
    """Loads the Megatron checkpoint made of the HF directory. Raises RuntimeError with Megatron's traceback.

    A mapping that is wrong in one layer and changes logits by more than `enough` is not made wrong in all. With None no
    mapping is made wrong.
    """
    with TemporaryDirectory() as folder:
        question, answer = Path(folder) / "question.pt", Path(folder) / "answer.pt"
        torch.save({"hf": str(hf), "megatron": str(megatron), "tokens": tokens, "enough": enough}, question)
        run_module("megatron", "families.worker", question, answer)
        return Answer(**torch.load(answer, weights_only=False))


# What follows runs in that process.


def main():
    from support.megatron_layers import compute_layers

    from ckptkit.converters.megatron.parallel import ParallelSizes
    from ckptkit.verify.witnesses.megatron.model import connect

    question, answer = map(Path, sys.argv[1:])
    connect(ParallelSizes(), 0, str(question.with_name("store")))
    compute_layers()
    torch.save(_answer(torch.load(question, weights_only=False)), answer)


def _answer(question):
    from ckptkit.converters.megatron.hybrid_model import is_hybrid
    from ckptkit.converters.megatron.module_names import global_name
    from ckptkit.converters.megatron.parallel import ParallelSizes
    from ckptkit.converters.planner import dims_of, rules_of, to_megatron
    from ckptkit.formats.detect import locate
    from ckptkit.formats.hf.reader import HfCheckpoint
    from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
    from ckptkit.verify.witnesses.megatron import model as megatron_model
    from ckptkit.verify.witnesses.megatron.process import held_by, load_chunks
    from ckptkit.verify.witnesses.megatron.slices import layers_of_chunk
    from families.layers import of_last_layer, recorded_layers, replaced, reused_layers, untouched
    from families.mutations import mutations

    source = HfCheckpoint(question["hf"])
    dims, tokens = dims_of(source.config), question["tokens"]
    path = locate(question["megatron"]).path
    hybrid = is_hybrid(TorchDistCheckpoint(path).specs)
    (model,) = megatron_model.build_chunks(
        dims, megatron_model.MegatronBuild(ParallelSizes(), torch.float32, hybrid=hybrid)
    )
    _, missing, unexpected, refused = load_chunks([model], str(path))
    with recorded_layers(model.decoder.layers) as outputs:
        logits, mtp = _logits(model, tokens, dims)
    answer = {
        "logits": logits,
        "mtp": mtp,
        "missing": sorted(missing),
        "unexpected": sorted({*unexpected, *refused}),
        "mutated": {},
    }
    if question["enough"] is None:
        return answer
    rules = list(rules_of(source.config))
    held = {}
    for local, tensor in held_by(model).items():
        held.setdefault(
            global_name(local, layers_of_chunk(model), range(dims.experts), {rule.megatron: rule for rule in rules}), []
        ).append(tensor)
    unfused = to_megatron(source, "the test model").source
    hf = {name: tensor for names in unfused.groups for name, tensor in unfused.read(names).items()}

    # A layer without an indexer of its own takes what an earlier one has computed in the same pass.
    reusable = 0 if dims.indexer is not None and dims.indexer.every > 1 else len(outputs)

    def change(tensors):
        reused = outputs[: min(untouched(tensors, len(outputs)), reusable)]
        with replaced(held, tensors), reused_layers(model.decoder.layers, reused):
            found = _logits(model, tokens, dims)
        return max(
            far(now, then)
            for now, then in zip(found, (logits, mtp), strict=True)
            if now is not None and then is not None
        )

    for label, changed in mutations(rules, hf):
        found = change(of_last_layer(changed))
        answer["mutated"][label] = found if found > question["enough"] else change(changed)
    return answer


def _logits(model, tokens, dims):
    from ckptkit.verify.witnesses.megatron import model as megatron_model

    *mtp, logits = (found[..., : dims.vocab] for found in megatron_model.all_logits(model, tokens))
    return logits, torch.cat(mtp) if mtp else None


if __name__ == "__main__":
    main()
