"""`make examples`: reports of one run that passes and one that fails, in every format, and a screenshot of the page.

The model is the small mixture of experts of `docs.examples.demo`, with seeded random weights. Nothing of the machine
gets into the reports: paths are relative to the directory that all is made in, and seconds are 0.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from ckptkit.app.api import quantize
from ckptkit.core.installation import program_version
from ckptkit.core.specs import summarize
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.hf.writer import SafetensorsFiles
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.transfer.files import FilesWriter
from ckptkit.verify.core.report import CheckResult, Finding, Report
from ckptkit.verify.reports import FORMATS, write_report
from ckptkit.verify.reports.heat import Measured, heat_map
from ckptkit.verify.run import verify
from docs.examples.demo import MOE, make_release

HERE = Path(__file__).resolve().parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def broken_int4(int4: Path, path: Path) -> None:
    """A copy of an INT4 checkpoint with three faults: another expert's scales, a NaN, a key projection of zeros."""
    source = HfCheckpoint(int4)
    tensors = dict(source.read(list(source.specs)))
    layer = "model.layers.{}.mlp.experts.{}.{}_proj.weight_scale"
    for expert in range(6, 12):
        tensors[layer.format(5, expert, "down")] = tensors[layer.format(5, (expert + 1) % 12, "down")].clone()
    tensors[layer.format(9, 3, "up")][0, 0] = float("nan")
    tensors["model.layers.3.self_attn.k_proj.bias"] = torch.zeros_like(tensors["model.layers.3.self_attn.k_proj.bias"])
    shutil.copytree(int4, path)
    for file in path.glob("*.safetensors"):
        file.unlink()
    writer = FilesWriter(path, SafetensorsFiles(source.specs, source.layout))
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.finish()


def example(path: str, source: str) -> Report:
    """The report of `ckptkit verify PATH --source SOURCE`, run in the working directory.

    Its paths are relative to that, seconds are 0, and its date is always the same.
    """
    command = ["ckptkit", "verify", path, "--source", source, "--report", "report.html"]
    report = verify(path, source=source, command=command)
    return replace(
        report,
        date="2026-01-01T00:00:00+00:00",
        checks=[replace(check, seconds=0.0) for check in report.checks],
        findings=[replace(one, file=one.file and os.path.relpath(one.file)) for one in report.findings],
    )


def large() -> Report:
    """What verify makes of 100 layers with 200 experts each: layers 70 and 80 exchanged, experts of a rank misnumbered.

    The report is made up, since the weights of such a model take minutes to write; the page is made as any.
    """
    parts = [f"mlp.experts.{expert}.{part}_proj" for expert in range(200) for part in ("gate", "up", "down")]
    parts += ["input_layernorm", "mlp.gate", *(f"self_attn.{part}_proj" for part in "qkvo")]
    names = [f"model.layers.{layer}.{part}.weight" for layer in range(100) for part in parts]
    moved = frozenset(name for name in names if name.startswith(("model.layers.70.", "model.layers.80.")))
    local = frozenset(
        f"model.layers.42.mlp.experts.{expert}.{part}_proj.weight"
        for expert in range(50, 100)
        for part in ("up", "down")
    )
    wrong = {
        "layers {70,80} are exchanged": (moved, "their names were exchanged where they were written: save again"),
        "experts {50..99} hold the values of experts {0..49}": (local, "save again with global expert IDs"),
    }
    findings = [
        Finding("CK202", "own values", text, hint, summarize(found), len(found), "moe-large", names=found)
        for text, (found, hint) in wrong.items()
    ]
    heat = heat_map(((name, Measured(0.0, failed=name in moved | local)) for name in names), findings)
    unable = "SGLang is not installed"
    checks = [
        CheckResult("CK104", "index, shards and config name the same tensors", "passed", None, len(names), 0, 1.2),
        CheckResult("CK202", "values equal the source's, bit for bit", "failed", None, len(names), 0, 132.4),
        CheckResult("CK402", "every rank holds its slice of the source", "passed", None, len(names), 0, 260.0),
        CheckResult("CK501", "SGLang loads the checkpoint", "skipped", unable),
    ]
    command = ["ckptkit", "verify", "moe-large", "--source", "moe", "--against-megatron", "--against-sglang"]
    reasons = [f"CK501: {unable}"]
    return Report(
        program_version(), command, "moe-large", "moe", checks, findings, {}, heat, reasons, not_asked=("vLLM",)
    )


def screenshot(page: Path, image: Path, width: int, *, dark: bool = False) -> None:
    """What a browser shows of the page in so many pixels. Without a browser the image stays as it is."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        print(f"none of {', '.join(BROWSERS)} is on PATH: {image.name} was left as it is", file=sys.stderr)
        return
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses to be started by root
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", *sandbox, f"--user-data-dir={profile}", "--hide-scrollbars"]
        command += ["--blink-settings=preferredColorScheme=0"] if dark else []
        command += [f"--window-size={width},900", f"--screenshot={image}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    """Makes all the examples, in this file's directory."""
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        Path(".git").mkdir()  # SARIF names files relative to a repository
        make_release("glm4_moe", MOE, Path("moe"), "8MB")
        quantize("moe", "moe-int4", QuantScheme(32, "qmax7"))
        broken_int4(Path("moe-int4"), Path("moe-broken"))
        for name, path in (("passed", "moe-int4"), ("failed", "moe-broken")):
            report = example(path, "moe")
            if report.status != name:
                raise SystemExit(f"{path} {report.status}, which is no example of a run that {name}")
            for ending in FORMATS:
                write_report(report, HERE / f"{name}{ending}")
        page = Path(directory) / "large.html"
        write_report(large(), page)
        screenshot(page, HERE / "large.png", 1280)
        os.chdir(HERE)
    screenshot(HERE / "failed.html", HERE / "failed.png", 1280)
    screenshot(HERE / "failed.html", HERE / "failed-phone.png", 390, dark=True)


if __name__ == "__main__":
    main()
