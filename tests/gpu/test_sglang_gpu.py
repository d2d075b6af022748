"""Real SGLang on a GPU: checkpoints load, and what is repacked for Marlin's kernels is what was loaded."""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from families import ALL_CASES, HF_CASES
from support import models
from support.engine_models import FOR_MARLIN, for_marlin
from support.quantized import fp8_blocks, small_groups_allowed, write
from support.sglang_runs import Case, checked, int4_config, online_int4, reported, run_cases, written
from transformers import Qwen2Config

from ckptkit.app.api import convert, quantize
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.checks.witnesses.loading import KEEP_ROUTER
from ckptkit.verify.run import verify

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]

GROUP = 32
ONLINE = ["lm_head", "model.embed_tokens"]
UNFUSED = "re:.*shared_experts.*"

CONFIGS = for_marlin(12, num_nextn_predict_layers=0)
DENSE = Qwen2Config(**{key: value for key, value in FOR_MARLIN.items() if "expert" not in key and "moe" not in key})
ASYMMETRIC = QuantScheme(GROUP, "minmax", (), symmetric=False)
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
OTHER_FORMATS = ("zero points qwen2", "zero points qwen3_moe", "channel zero points qwen2", "fp8 qwen3_moe")
ROUTERS = {"qwen3_moe": "model.layers.{0..4}.mlp.gate.weight", "glm4_moe": "model.layers.{1..4}.mlp.gate.weight"}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    root = tmp_path_factory.mktemp("gpu")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, config in CONFIGS.items():
            patch.setitem(ALL_CASES, name, replace(HF_CASES[name], config=partial(deepcopy, config)))
        for name in CONFIGS:
            release = root / name
            models.save(name, release)
            tensors = models.tensors(release)
            found[f"bf16 {name}"] = Case(release)
            for grid in ("qmax7", "minmax"):
                quantize(release, root / f"{name}-{grid}", QuantScheme(GROUP, grid))
                found[f"{grid} {name}"] = Case(root / f"{name}-{grid}")
            kept = [*ONLINE, KEEP_ROUTER, UNFUSED]
            for kind, ignore in (("online", kept), ("router", [*ONLINE, UNFUSED])):
                packed = online_int4(tensors, ignore, GROUP)
                found[f"{kind} {name}"] = Case(
                    written(root, f"{name}-{kind}", release, packed, quantization_config=int4_config(ignore, GROUP))
                )
            convert(release, root / f"{name}-megatron")
            found[f"megatron {name}"] = Case(root / f"{name}-megatron", release)
        patch.setitem(ALL_CASES, "qwen2-untied", replace(HF_CASES["qwen2-untied"], config=partial(deepcopy, DENSE)))
        models.save("qwen2-untied", root / "qwen2")
        quantize(root / "qwen2", root / "qwen2-zeros", ASYMMETRIC)
        quantize(root / "qwen2", root / "qwen2-channel", replace(ASYMMETRIC, group_size=None))
        with small_groups_allowed():
            quantize(root / "qwen3_moe", root / "qwen3_moe-zeros", ASYMMETRIC, readers=("sglang",))
        projections = lambda name: name.endswith("_proj.weight")  # noqa: E731
        write(
            root / "qwen3_moe",
            root / "qwen3_moe-fp8",
            projections,
            fp8_blocks(128, 128),
            lambda config: config | {"quantization_config": FP8},
        )
        directories = ("qwen2-zeros", "qwen3_moe-zeros", "qwen2-channel", "qwen3_moe-fp8")
        yield found | {name: Case(root / directory) for name, directory in zip(OTHER_FORMATS, directories, strict=True)}


@pytest.fixture(scope="module")
def runs(cases, tmp_path_factory):
    runs = run_cases(cases, tmp_path_factory.mktemp("reports"), gpu=True)
    for name, run in runs.items():
        print(f"{name}: {run.failure or run.report}")
    return runs


def findings(case, run):
    results, found, facts = checked(case, run)
    for line in (*found, *facts.get("SGLang", ())):
        print(line)
    return {code: result.status for code, result in results.items()}, {
        (finding.code, finding.tensor) for finding in found
    }


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("kind", ["bf16", "qmax7", "minmax", "online", "megatron"])
def test_sound_checkpoints_pass_through_repacking(kind, family, cases, runs):
    name = f"{kind} {family}"
    status, found = findings(cases[name], runs[name])
    assert found == set()
    assert status == {f"CK50{number}": "passed" for number in range(1, 7)}
    report = reported(runs[name])
    assert report.device == torch.cuda.get_device_name()
    assert (report.repacked, report.unchecked) == ((), ())
    assert report.repacked_seen > 0


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_zero_points_and_fp8_blocks_pass_through_repacking(name, cases, runs):
    """Experts' zero points come in AWQ's order, Linear layers' in compressed-tensors'; both end in Marlin's."""
    status, found = findings(cases[name], runs[name])
    assert found == set()
    assert {code for code, one in status.items() if one == "passed"} == {
        f"CK50{number}" for number in range(1, 7) if number != 5 or "moe" in name
    }
    report = reported(runs[name])
    assert (report.repacked, report.unchecked) == ((), ())
    assert report.repacked_seen > 0


@pytest.mark.parametrize("family", CONFIGS)
def test_the_quantized_router_is_named(family, cases, runs):
    name = f"router {family}"
    status, found = findings(cases[name], runs[name])
    router = ROUTERS[family]
    assert found >= {("CK502", router), ("CK503", f"{router}_packed"), ("CK505", router)}
    assert {tensor for _, tensor in found} <= {router, f"{router}_packed", f"{router}_scale", f"{router}_shape"}
    assert [status[code] for code in ("CK501", "CK502", "CK503", "CK504", "CK505")] == [
        "passed",
        "failed",
        "failed",
        "passed",
        "failed",
    ]


def test_verify_against_sglang_on_the_gpu_passes(cases):
    report = verify(cases["qmax7 qwen3_moe"].checkpoint, against=frozenset({"sglang"}))
    for line in (*report.findings, *report.checks, report.facts):
        print(line)
    assert report.status == "passed"
    assert {check.code: check.status for check in report.checks if check.code.startswith("CK5")} == {
        f"CK50{number}": "passed" for number in range(1, 7)
    }
