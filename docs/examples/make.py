"""`make examples`: reports of one run that passes and one that fails, in every format, and a screenshot of the page.

The model is the small mixture of experts of `ckptkit.app.demo`, with seeded random weights. Nothing of the machine gets
into the reports: paths are relative to the directory that all is made in, and seconds are 0.
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
from ckptkit.app.demo import MOE, make_release
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.hf.writer import SafetensorsFiles
from ckptkit.transfer.files import FilesWriter
from quant.formats.scheme import QuantScheme
from verify.report import Report
from verify.reports import FORMATS, write_report
from verify.run import verify

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


def screenshot(page: Path, image: Path, width: int) -> None:
    """What a browser shows of the page in so many pixels. Without a browser the image stays as it is."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        print(f"none of {', '.join(BROWSERS)} is on PATH: {image.name} was left as it is", file=sys.stderr)
        return
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses to be started by root
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", *sandbox, f"--user-data-dir={profile}", "--hide-scrollbars"]
        command += [f"--window-size={width},1000", f"--screenshot={image}", page.as_uri()]
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
        os.chdir(HERE)
    screenshot(HERE / "failed.html", HERE / "failed.png", 1280)
    screenshot(HERE / "failed.html", HERE / "failed-phone.png", 390)


if __name__ == "__main__":
    main()
