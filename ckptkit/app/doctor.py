"""Lists installed packages, usable parts and missing requirements, from metadata: imports none of the packages."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from ckptkit.core.installation import INSTALL_CONVERT, program_version, requirements
from ckptkit.verify.quirks import releases_of
from ckptkit.verify.witnesses.process.interpreter import Interpreter, python_of
from ckptkit.verify.witnesses.registry import ENGINES

SCHEMA = "ckptkit-doctor/1"
# Modules of distributions with a different name.
_MODULE = {"pyyaml": "yaml", "megatron-core": "megatron.core", "pyopenssl": "OpenSSL"}
# Requirements of each part in addition to ckptkit's own, and its purpose.
_NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    "convert": (
        ("torch", "transformers", "compressed-tensors", "numba"),
        "convert, quantize, diff, and verify on values",
    ),
    "megatron": (("megatron-core",), "verify --against-megatron"),
    **{one.name: ((one.name,), f"verify --against-{one.name}") for one in ENGINES},
    "engine": (("sglang",), "verify --engine [--logits], --update, --release-resume"),
    "ray": (("ray",), "--ray"),
    "remote": (("s3fs", "gcsfs"), "s3:// and gs:// (hf:// needs neither)"),
}
PARTS = tuple(_NEEDS)
_PYTHON_OF = {"engine": "sglang"}  # parts in the environment of a program with another name
_SHOWN = ("torch", "transformers")  # packages that identify another environment by their versions
_INSTALL = {one.name: one.install for one in ENGINES} | {"convert": INSTALL_CONVERT}
_TESTED = {one.name: one.tested for one in ENGINES} | {"megatron-core": releases_of("megatron")}


@dataclass(frozen=True)
class Package:
    """A distribution: its version if installed, whether its module is missing, and pip's version specifier."""

    name: str
    version: str | None
    broken: bool = False
    needed: str = ""


@dataclass(frozen=True)
class Part:
    """An optional part of ckptkit: `usable` on `devices`, or `missing` a package. `tested`: releases in the tests."""

    name: str
    purpose: str
    usable: bool
    devices: str
    missing: str | None
    python: str | None = None  # of a separate environment
    versions: Sequence[str] = ()  # in that environment
    tested: Sequence[str] = ()


@dataclass(frozen=True)
class Examination:
    """The state of this installation and machine. `faults` are those of ckptkit's own installation."""

    version: str
    python: str
    gpus: Sequence[str]
    packages: Sequence[Package]
    parts: Sequence[Part]
    faults: Sequence[str]

    def broken(self, names: Iterable[str]) -> bool:
        """Whether ckptkit's own installation, or one of the named parts, cannot be used."""
        required = set(names)
        return bool(self.faults) or any(part.name in required and not part.usable for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        """JSON with the schema `ckptkit-doctor/1`, to which keys are only added."""
        return {"schema": SCHEMA, **asdict(self)}


def examine(pythons: Mapping[str, str] | None = None) -> Examination:
    """Reads metadata of installed packages, and runs nvidia-smi. Raises UsageError for an unusable one of `pythons`."""
    base = [replace(_package(name), needed=needed) for name, needed in _requirements().items()]
    of_convert = _requirements("convert")
    optional = {
        name: replace(_package(name), needed=of_convert.get(name, "")) for names, _ in _NEEDS.values() for name in names
    }
    gpus = _gpus()
    faults = [f"{one.name} is {'damaged' if one.broken else 'not installed'}" for one in base if not _usable(one)]
    parts = [
        _part_elsewhere(name, names, purpose, gpus, interpreter)
        if (interpreter := Interpreter(python_of(_PYTHON_OF.get(name, name), pythons or {}))).is_external
        else _part(name, [optional[one] for one in names], purpose, gpus)
        for name, (names, purpose) in _NEEDS.items()
    ]
    packages = [*base, *optional.values()]
    return Examination(program_version(), platform.python_version(), gpus, packages, parts, faults)


def _requirements(extra: str | None = None) -> dict[str, str]:
    """The version specifiers of the requirements of ckptkit or an extra, by package."""
    found = [re.match(r"[\w.-]+", text) for text in requirements(extra)]
    return {one[0].lower(): one.string[one.end() :].strip() for one in found if one}


def _package(name: str) -> Package:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Package(name, None)
    module = _MODULE.get(name, name.replace("-", "_"))
    parent, _, child = module.partition(".")
    spec = find_spec(parent)
    if spec is not None and child:  # without importing the parent
        spec = PathFinder.find_spec(module, spec.submodule_search_locations)
    return Package(name, found, broken=spec is None)


def _usable(package: Package) -> bool:
    return package.version is not None and not package.broken


def _gpus() -> list[str]:
    """The GPUs that NVIDIA's driver lists, if it is installed."""
    program = shutil.which("nvidia-smi")
    if program is None or not os.path.isabs(program):  # PATH may contain the current directory, maybe a checkpoint
        return []
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return []
    return [line.partition(" (UUID")[0] for line in done.stdout.splitlines() if line.startswith("GPU ")]


def _part_elsewhere(
    name: str, names: Sequence[str], purpose: str, gpus: Sequence[str], interpreter: Interpreter
) -> Part:
    """A part in a separate environment."""
    found = {one: interpreter.release(one) for one in (*names, *_SHOWN)}
    part = _part(name, [Package(one, found[one]) for one in names], purpose, gpus)
    versions = [f"{one} {release}" for one, release in found.items() if release is not None]
    return replace(part, python=interpreter.path, versions=versions)


def _part(name: str, packages: Sequence[Package], purpose: str, gpus: Sequence[str]) -> Part:
    missing = [one.name for one in packages if not _usable(one)]
    needs = f"a GPU for each rank ({len(gpus)} here)"
    devices = {
        "megatron": f"CPU, or {needs}",
        "engine": needs,
        **{one.name: f"CPU, or {needs}; {'repacks INT4 and FP8' if gpus else one.on_cpu}" for one in ENGINES},
    }.get(name, "")
    needed = None
    if missing:
        needed = _INSTALL.get(name, f"pip install {' '.join(missing)}")
    elif name == "engine" and not gpus:
        needed = "an NVIDIA GPU and its driver"
    return Part(name, purpose, needed is None, devices, needed, tested=_TESTED.get(packages[0].name, ()))


def lines(found: Examination, parts: Collection[str] = ()) -> list[str]:
    """Formats an examination, or only these parts of it."""
    text = [f"ckptkit {found.version}, Python {found.python}, {sys.platform}"]
    text += [f"  {gpu}" for gpu in found.gpus] or ["  no NVIDIA GPU"]
    text += [] if parts else ["packages"]
    for one in () if parts else found.packages:
        state = "not installed" if one.version is None else f"{one.version}{' (damaged)' * one.broken}"
        text.append(f"  {one.name:<20} {state:<14} {one.needed}".rstrip())
    text += ["parts"]
    for part in (part for part in found.parts if not parts or part.name in parts):
        where = f"in {part.python}: {', '.join(part.versions)}" if part.python else ""
        rows = {"devices": part.devices, "python": where, "needed": part.missing, "tested": ", ".join(part.tested)}
        text.append(f"  {part.name:<10} {'ready' if part.usable else 'not ready':<10} {part.purpose}")
        text += [f"    {label:<8} {value}" for label, value in rows.items() if value]
    if found.faults:
        text += ["broken", *(f"  {fault}: install ckptkit again from its checkout or wheel" for fault in found.faults)]
    return text
