"""Two sides of a launch that must start from the same weights, compared by the digests beside them."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.messages import text_with

from ckptkit.app.api import convert, make_manifest, quantize
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.launch.preflight import preflight

NAME = "qwen3_moe"
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def hf(releases, tmp_path_factory):
    path = Path(shutil.copytree(releases(NAME), tmp_path_factory.mktemp("same") / "release"))
    make_manifest(path)
    return path


@pytest.fixture
def megatron(hf, converted, tmp_path):
    return Path(shutil.copytree(converted(NAME), tmp_path / "megatron"))


def of(report):
    return next(one for one in report.checks if one.code == "CK723")


def change(root, name):
    manifest = json.loads((root / "ckptkit.json").read_text())
    dtype, shape, digest = manifest["tensors"][name]
    manifest["tensors"][name] = [dtype, shape, digest[::-1]]
    (root / "ckptkit.json").write_text(json.dumps(manifest))


def test_megatron_weights_converted_from_the_engines_model_pass(hf, megatron):
    report = preflight(hf_checkpoint=hf, ref_load=megatron)
    assert report.status == "passed"
    # Norms, embeddings, routers and projections; not what Megatron fuses.
    assert of(report).status == "passed"
    assert of(report).tensors_compared > 100


def test_other_weights_than_the_engines_are_found(hf, megatron, only):
    change(megatron, "decoder.final_layernorm.weight")
    finding = only(preflight(hf_checkpoint=hf, ref_load=megatron))
    assert (finding.code, finding.severity, finding.file) == ("CK723", "warning", str(megatron / "release"))
    assert finding.tensor == "decoder.final_layernorm.weight"
    assert finding.expected == f"the digests of the rollout engine, {hf}"
    assert finding.actual == text_with("1 of 219")


def iteration(megatron, root, number=20):
    shutil.copytree(megatron, root)
    weights = (root / "release").rename(root / f"iter_{number:07d}")
    common = torch.load(weights / "common.pt", weights_only=False)
    torch.save({**common, "iteration": number}, weights / "common.pt")
    (root / TRACKER).write_text(str(number))
    return root


def test_a_run_that_resumes_has_weights_of_its_own(hf, megatron, tmp_path):
    """Its reference has not: that is still the engine's model, or an iteration of another run."""
    run = iteration(megatron, tmp_path / "run")
    change(run, "decoder.final_layernorm.weight")
    report = preflight(hf_checkpoint=hf, load=run, ref_load=megatron)
    assert (report.status, report.findings, report.to_json()["counts"]["bytes_compared"]) == ("passed", [], 0)
    assert preflight(hf_checkpoint=hf, load=run, ref_load=iteration(megatron, tmp_path / "b", 10)).findings == []
    report = preflight(hf_checkpoint=hf, load=run)
    assert report.verdict == "PASSED launch and files; weights not compared; engine not asked"
    assert text_with("CK723") in report.facts["not applicable"]


@pytest.fixture
def bare(megatron):
    (megatron / "ckptkit.json").unlink()
    return megatron


def test_without_digests_samples_are_compared(releases, bare):
    report = preflight(hf_checkpoint=releases(NAME), ref_load=bare)
    assert (report.status, report.findings, of(report).status) == ("passed", [], "passed")
    weights = sum(path.stat().st_size for path in releases(NAME).glob("*.safetensors"))
    assert of(report).tensors_compared == 64
    assert 0 < of(report).bytes_compared < min(64 * 3 * (32 << 10), weights)
    (note,) = report.facts["notes"]
    assert note == text_with(f"actor rollout engine 64 tensors MB `ckptkit diff {bare / 'release'} {releases(NAME)}`")


def trained(path, target, change):
    shutil.copytree(path, target)
    for file in target.glob("*.safetensors"):
        save_file({name: change(name, tensor) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return target


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_instruct_model_beside_its_base_is_found(dtype, releases, tmp_path, only):
    """Training leaves many norms as they are in bfloat16, and changes some elements of every matrix."""
    convert(releases(NAME), tmp_path / "base", dtype=dtype)
    (tmp_path / "base" / "ckptkit.json").unlink()
    assert preflight(hf_checkpoint=releases(NAME), ref_load=tmp_path / "base").findings == []
    instruct = trained(releases(NAME), tmp_path / "instruct", lambda _, one: one * 1.01 if one.dim() > 1 else one)
    finding = only(preflight(hf_checkpoint=instruct, ref_load=tmp_path / "base"))
    assert (finding.code, finding.severity) == ("CK723", "warning")
    assert (finding.file, finding.expected) == (
        str(tmp_path / "base" / "release"),
        f"the bytes of the rollout engine, {instruct}",
    )


@pytest.fixture
def wrong(releases, tmp_path):
    """The Megatron weights of another model with the same config: no tensor of it has to do with the release's."""
    generator = torch.Generator().manual_seed(0)

    def drawn(_, one):
        noise = torch.randn(one.shape, generator=generator)
        return (noise * one.float().std() + one.float().mean() if one.numel() > 1 else one.float()).to(one.dtype)

    convert(trained(releases(NAME), tmp_path / "other", drawn), tmp_path / "wrong")
    return tmp_path / "wrong"


def test_weights_of_another_model_than_the_engines_are_an_error(hf, bare, wrong, tmp_path, only):
    finding = only(preflight(hf_checkpoint=hf, load=wrong))
    assert (finding.code, finding.severity) == ("CK723", "error")
    (wrong / "ckptkit.json").unlink()
    for option in ("load", "ref_load"):
        finding = only(preflight(hf_checkpoint=hf, **{option: wrong}))
        assert (finding.code, finding.severity) == ("CK723", "error")
        assert re.match(r"\d\d of 64 .*, \d\d of them", finding.actual)
        sound = preflight(hf_checkpoint=hf, **{option: bare})
        assert (sound.status, sound.findings, of(sound).tensors_compared) == ("passed", [], 64)
    # An iteration may be any model with the engine's config.
    finding = only(preflight(hf_checkpoint=hf, ref_load=iteration(wrong, tmp_path / "run")))
    assert (finding.code, finding.severity) == ("CK723", "warning")


def test_an_int4_engine_is_compared_by_what_is_not_packed(releases, bare, tmp_path, only):
    ignore = tuple(f"re:.*{one}.*" for one in ("self_attn", r"mlp\.gate(\.|$)", "embed_tokens", "lm_head"))
    quantize(releases(NAME), tmp_path / "int4", QuantScheme(32, "qmax7", ignore))
    report = preflight(hf_checkpoint=tmp_path / "int4", ref_load=bare)
    assert (report.findings, of(report).status) == ([], "passed")
    assert any("packed" in line for line in report.facts["notes"])
    other = trained(tmp_path / "int4", tmp_path / "other", lambda name, one: one + 1 if "mlp.gate." in name else one)
    (other / "ckptkit.json").unlink()
    finding = only(preflight(hf_checkpoint=other, ref_load=bare))
    assert (finding.code, "router" in str(finding.tensor)) == ("CK723", True)


def test_damaged_weights_are_a_finding_and_no_end_of_the_run(releases, bare, only):
    for file in (bare / "release").glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    finding = only(preflight(hf_checkpoint=releases(NAME), ref_load=bare))
    assert (finding.code, finding.severity, finding.expected) == ("CK723", "error", text_with("bytes"))
    assert "File is not a zip file" in finding.actual
