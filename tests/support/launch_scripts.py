"""Launch scripts of seven families, each written in another way that bash allows: launches/ has the texts."""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

from releases.header_only import write
from releases.record import load

from ckptkit.verify.launch.arguments import launch_arguments
from ckptkit.verify.launch.options.arguments import parse_arguments
from ckptkit.verify.launch.words import Word

_TEXTS = Path(__file__).with_name("launches")
RAY, PLAIN = ((_TEXTS / f"{name}.sh").read_text() for name in ("ray", "plain"))


@dataclass(frozen=True)
class Family:
    release: str
    model: str
    sizes: str
    gpus: str


FAMILIES = {
    name: Family(model=(_TEXTS / f"{name}.sh").read_text(), **fields)
    for name, fields in tomllib.loads((_TEXTS / "families.toml").read_text()).items()
}


def arguments_of(words, environment=None):
    found = [Word(word) for word in words]
    return launch_arguments(parse_arguments(found), found, environment)


def write_launch(folder, name, root, template=RAY, change=str):
    """Writes `run.sh` and `models/NAME.sh` of a family into a folder; `change` edits either text. Returns `run.sh`."""
    family = FAMILIES[name]
    (folder / "models").mkdir(parents=True, exist_ok=True)
    (folder / "models" / f"{name}.sh").write_text(change(family.model))
    for placeholder, text in (("FAMILY", name), ("ROOT", str(root))):
        template = template.replace(placeholder, text)
    script = folder / "run.sh"
    script.write_text(change(template.replace("SIZES", family.sizes).replace("GPUS", family.gpus)))
    return script


def write_config(folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(load(FAMILIES[name].release).config))
    return folder


def write_headers(folder, name):
    return write(load(FAMILIES[name].release), folder)


def quantized_launch(folder, name, quantization, change=str):
    """The `run.sh` of a launch whose engine serves the family's release, quantized so, and no weights."""
    root = write_config(folder / "hf", name)
    config = json.loads((root / "config.json").read_text())
    config |= {} if quantization is None else {"quantization_config": dict(quantization)}
    (root / "config.json").write_text(json.dumps(config))
    return write_launch(folder, name, root, change=change)


def loads(report):
    return list(report.facts["what would be loaded"])


def passes(report):
    return (report.status, list(report.findings), list(report.reasons)) == ("passed", [], [])
