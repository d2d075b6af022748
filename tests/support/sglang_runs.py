"""Loads many checkpoints into real SGLang in one process, since starting SGLang is what takes time.

Also what the tests quantize with: a formula that shares nothing with the code under test.
"""

import json
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ckptkit.verify.witnesses.loading.job import ONE_RANK, LoadJob, LoadReport
from ckptkit.verify.witnesses.loading.run import outcome, run_engine_load
from ckptkit.verify.witnesses.process.codec import decoded
from ckptkit.verify.witnesses.process.exit_report import exit_report_of
from ckptkit.verify.witnesses.runner import Answer, read_answer
from ckptkit.verify.witnesses.sglang.facts import SGLANG
from support.forking import ran
from support.processes import run_logged

Weights = Iterator[tuple[str, Tensor]]


# A norm, up of an expert beside its gate, and all of another expert. In INT4 up loses its packed weight alone.
LOST = re.compile(
    r".*layers\.(5\.(input_layer|attn_)?norm\.weight"
    r"|6\.\w+\.experts\.7\.(up_proj|w3)\.weight|7\.\w+\.experts\.2\.\w+\.weight)"
)
LOST_PARTS = re.compile(r".*layers\.(5\.input_layernorm\.weight|6\.\w+\.experts\.7\.(up_proj|w3)\.weight_packed)")
# What rank 1 loses: a norm, and the queries, of which it holds a slice. Layer 7 has attention in hybrid models too.
LOST_ON_RANK_1 = re.compile(r".*layers\.7\.(input_layernorm|attn_norm|self_attn\.(q_proj|q_b_proj)|attn\.wq_b)\.weight")
FUSED = re.compile(
    r".*layers\.3\.((mlp\.)?experts\.(gate_up|down)_proj(_bias)?|block_sparse_moe\.(in|out)put_linear\.weight)"
)


# Of a multi-token prediction layer: the projection of both inputs, a norm, and up of an expert.
DRAFT = r"(?:model\.|language_model\.)*(?:layers\.12|mtp(?:\.layers)?(?:\.0)?)\."
LOST_OF_DRAFT = re.compile(
    DRAFT + r"(eh_proj\.weight|fc\.weight|input_layernorm\.weight|mlp\.experts\.7\.up_proj\.weight(_packed)?)"
    r"|mtp\.0\.(e_proj|attn_norm|ffn\.experts\.7\.w3)\.weight"
    r"|mtp\.layers\.(0\.norm|1\.mixer\.experts\.7\.up_proj)\.weight"
)
_SWAPPED = re.compile(rf"((?:.*layers\.3\.\w+|{DRAFT}mlp|mtp\.0\.ffn|mtp\.layers\.1\.mixer)\.experts\.)([45])\.")


def unaltered(weights):
    return weights


def swapped_experts(weights):
    """Experts 4 and 5 of layer 3, and of a multi-token prediction layer, under each other's names.

    In each other's places where all experts are one tensor.
    """
    other = {"4": "5", "5": "4"}
    for name, tensor in weights:
        if FUSED.fullmatch(name):
            tensor = tensor[[0, 1, 2, 3, 5, 4, *range(6, len(tensor))]]
        yield _SWAPPED.sub(lambda match: f"{match[1]}{other[match[2]]}.", name), tensor


def swapped_scales(weights):
    """The scales of FP8 blocks of gate and up of one expert under each other's names."""
    gate, up = (f"model.layers.5.mlp.experts.11.{one}_proj.weight_scale_inv" for one in ("gate", "up"))
    names = {gate: up, up: gate}
    for name, tensor in weights:
        yield names.get(name, name), tensor


def one_bit(weights):
    for name, tensor in weights:
        if name == "model.layers.7.self_attn.k_proj.weight":
            tensor = tensor.clone()
            tensor.view(torch.int16)[3, 4] ^= 1
        yield name, tensor


def half_written(weights):
    """A loader with a defect: it fills only the first half of every expert's down projection."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    original = FusedMoE._load_w2

    def half(self, *, expert_data, loaded_weight, **rest):
        columns = expert_data.shape[1] // 2
        expert_data[:, :columns].copy_(loaded_weight[:, :columns])

    FusedMoE._load_w2 = half
    yield from weights
    FusedMoE._load_w2 = original


def lost_and_exchanged(weights):
    """What LOST matches is missing; experts 4 and 5 of layer 3 are exchanged.

    In a multi-token prediction layer too, which also lacks its projection of both inputs.
    """
    lost = (LOST, LOST_PARTS, LOST_OF_DRAFT)
    return swapped_experts((name, tensor) for name, tensor in weights if not any(one.fullmatch(name) for one in lost))


def lost_on_one_rank(weights):
    """As `lost_and_exchanged`, and rank 1 is not given what LOST_ON_RANK_1 matches."""
    rank = torch.distributed.get_rank()
    return lost_and_exchanged(
        (name, tensor) for name, tensor in weights if rank != 1 or not LOST_ON_RANK_1.fullmatch(name)
    )


def broken_feed(weights):
    """What our own code does when it has a defect."""
    yield next(weights)
    raise KeyError("a defect of ours")


def without_draft_classes(weights):
    """An SGLang that has no draft class for this model, from now on."""
    from sglang.srt.configs.model_config import ModelConfig

    ModelConfig._config_draft_model = lambda self: None
    yield from weights


ALTER = {
    one.__name__: one
    for one in (
        unaltered,
        swapped_experts,
        one_bit,
        half_written,
        lost_and_exchanged,
        lost_on_one_rank,
        broken_feed,
        swapped_scales,
        without_draft_classes,
    )
}


def online_int4(weights, ignore, group):
    """Packs as an online quantizer that goes by names: every `.weight` with two axes, unless a rule matches its name.

    Symmetric, scale = largest magnitude of the group / 7, codes stored + 8, eight a word, lowest bits first.
    """
    result = {}
    for name, tensor in weights.items():
        ignored = any(re.match(rule[3:], name) if rule.startswith("re:") else name.startswith(rule) for rule in ignore)
        if not name.endswith(".weight") or tensor.dim() < 2 or ignored:
            result[name] = tensor
            continue
        groups = tensor.float().unflatten(1, (-1, group))
        scale = (groups.abs().amax(-1) / 7).to(tensor.dtype)
        codes = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7).flatten(1).long() + 8
        words = (codes.unflatten(1, (-1, 8)) << (4 * torch.arange(8))).sum(-1).to(torch.int32)
        result |= {f"{name}_packed": words, f"{name}_scale": scale, f"{name}_shape": torch.tensor(tensor.shape)}
    return result


def int4_config(ignore, group):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
    }


@dataclass(frozen=True)
class Case:
    """A checkpoint, what its values are compared with, and what happens to them on the way (a name of ALTER)."""

    checkpoint: Path
    source: Path | None = None
    alter: str = "unaltered"


def written(root, name, release, tensors, **config):
    """An HF directory with these tensors, and the release's config with some values replaced."""
    path = root / name
    path.mkdir()
    save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(json.loads((release / "config.json").read_text()) | config))
    return path


def run_cases(cases, root, *, gpu=False, sizes=ONE_RANK, engine=SGLANG, start=None):
    """What an engine made of every case, on the CPU unless `gpu`, in a process a rank.

    `start` starts such a process, with its log and the words behind `python -m`. After a crash new processes go on with
    the next.
    """
    orders = {}
    for number, (name, case) in enumerate(cases.items()):
        (scratch := root / f"scratch-{number}").mkdir()
        job = LoadJob(engine.adapter, case.checkpoint, source=case.source, report=str(scratch / "report"), sizes=sizes)
        orders[name] = {"job": asdict(job), "alter": case.alter}
    runs = {}
    while left := {name: order for name, order in orders.items() if name not in runs}:
        (root / "cases.json").write_text(json.dumps(list(left.values()), default=str))
        logs = [root / f"log-{rank}" for rank in range(sizes.ranks)]
        with ThreadPoolExecutor(sizes.ranks) as pool:
            run = start or (partial(run_logged, gpu=True) if gpu else partial(ran, "sglang"))
            started = [
                pool.submit(run, log, f"support.{engine.name}_runs", root / "cases.json", str(rank))
                for rank, log in enumerate(logs)
            ]
        ended = all(one.result() for one in started)
        for name, order in left.items():
            reports = {rank: Path(f"{order['job']['report']}-{rank}.json") for rank in range(sizes.ranks)}
            missing = [rank for rank, report in reports.items() if not report.exists()]
            raised = [rank for rank, report in reports.items() if exit_report_of(report).message]
            failed = dict.fromkeys(missing or raised, "it stopped")
            runs[name] = outcome(read_answer(LoadReport, reports, dict(enumerate(logs)), failed), sizes.ranks)
            if missing and not ended:
                break
    return runs


Runs = Mapping[str, Answer[LoadReport]]


def reported(run):
    assert run.report is not None, run
    return run.report


def draft_of(run):
    return run.report.draft_model if run.report else None


def refusal(run):
    """The words in which an engine refused the model or its draft model; empty where it did not."""
    return run.failure.message if run.failure and run.failure.verdict else ""


def answered(report):
    return Answer({0: report}, {})


def clean(run):
    """The report of a run in which every tensor is where the engine keeps it."""
    report = reported(run)
    assert (report.unwritten, report.dropped, report.differing, report.routers, report.computed) == ((), (), (), (), ())
    return report


def checked(case, run, engine=SGLANG):
    """The CK5xx checks over a run of the witness that has been made already."""
    # The processes that load have none of the packages that checks need.
    from ckptkit.verify.core.check import all_checks
    from ckptkit.verify.core.run import run_checks
    from ckptkit.verify.core.subject import Subject
    from ckptkit.verify.options import VerifyOptions

    subject = Subject(case.checkpoint, case.source, options=VerifyOptions(against=frozenset({engine.name})))
    subject._results[run_engine_load, engine] = run
    outcome = run_checks(subject, [one for one in all_checks() if one.stage == engine.name])
    results, findings, facts = outcome.checks, outcome.findings, outcome.facts
    return {result.code: result for result in results}, findings, facts


def main(alter=ALTER):
    from ckptkit.verify.witnesses.loading.process import run

    for case in json.loads(Path(sys.argv[1]).read_text()):
        content = case["job"]
        rank = int(sys.argv[2])
        report = f"{content['report']}-{rank}.json"
        job = replace(decoded(LoadJob, content), rank=rank, report=report)
        try:
            run(job, alter[case["alter"]])
        except Exception:  # noqa: BLE001
            traceback.print_exc()  # what was raised stands in the job's `ExitReport`; the next case is not concerned


if __name__ == "__main__":
    main()
