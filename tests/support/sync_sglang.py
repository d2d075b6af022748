"""Checksums by SGLang's own checker of SGLang's own models on the CPU."""

import json
from functools import partial
from types import SimpleNamespace

import torch

from ckptkit.verify.witnesses.loading.engine import ModelBuild
from ckptkit.verify.witnesses.loading.job import EngineSizes
from ckptkit.verify.witnesses.process.exit_report import ExitReport
from ckptkit.verify.witnesses.sglang.adapter import build
from support.calls import call
from support.installed import release
from support.processes import fork_ranks
from support.sglang_cpu_logits import load_weights
from support.sync_faults import tensors_of, updates

SAMPLE = torch.arange(100.0).reshape(10, 10).T  # not contiguous


def checksums(root, tp, paths):
    """By the model's directory and update: what each rank answers. `root` gets SGLang's digest of SAMPLE."""
    root.mkdir()
    call("sglang", _ranks, tp, root, paths)
    ranks = {
        path.name: [json.loads((root / f"{path.name}-{rank}.json").read_text()) for rank in range(tp)] for path in paths
    }
    return {name: [list(state) for state in zip(*found, strict=True)] for name, found in ranks.items()}


def _answers(path, out, tp, rank):
    import msgspec
    from sglang.srt.managers.io_struct import ChecksumInfo, CheckWeightsReqOutput
    from sglang.srt.utils import weight_checker

    wanted = ModelBuild(path, out, sizes=EngineSizes(tp), rank=rank)
    model = build(wanted, load_weights, ExitReport(out / f"report-{rank}"))
    place = SimpleNamespace(tp_rank=rank, dp_rank=None, attn_dp_size=1, pp_rank=0, pp_size=1, tp_size=tp)
    # SGLang 0.5.23 finds its ranks by itself, and asks which of an engine's models it is.
    newer = release("sglang") >= (0, 5, 23)
    if newer:
        weight_checker.get_parallel = lambda: place
    checker = weight_checker.WeightChecker(get_model=lambda: model, **{} if newer else {"ps": place})
    about = {"role": "target"} if newer else {}
    found = []
    tensors = tensors_of(path)
    for update in updates(tensors):
        model.load_weights(list(update.arrived(tensors).items()))
        answer = checker.handle("checksum", **about)
        if newer:  # a list, with those of draft models
            answer["parallelism_info"] = [answer["parallelism_info"]]
        info = msgspec.convert(answer, ChecksumInfo)
        reply = CheckWeightsReqOutput(success=True, message="Success.", payload=[info])
        found += [msgspec.to_builtins(one) for one in reply.payload]
    return found


def _rank(tp, out, paths, rank):
    torch.cuda.synchronize = lambda device=None: None
    for path in paths:
        (out / f"{path.name}-{rank}.json").write_text(json.dumps(_answers(path, out, tp, rank)))


def _ranks(tp, out, paths):
    from ckptkit.verify.weight_sync.sglang import sglang_digest

    (out / "digest").write_text(sglang_digest()(SAMPLE))
    assert fork_ranks(tp, partial(_rank, tp, out, paths))
