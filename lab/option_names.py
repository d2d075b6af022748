"""Writes the lists of option names in `verify/launch/options/names/`, each from a program's own source or parser.

    python lab/option_names.py slime CHECKOUT "624b824 (2026-08-21)"
    python lab/option_names.py sglang [FOLDER]

For an engine also what is in `quant/engines/`, from the registries of the SGLang or vLLM in the Python that runs
this; with a FOLDER only that, written there.

The release stands in the first line of a list, and `preflight` names it. SGLang and what ROLL has of transformers are
taken from the installed packages; CHECKOUT of sglang-router is its unpacked wheel.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "verify" / "launch" / "options" / "names"
# What draft models are called in SGLang, which has no list of them apart from other models.
_DRAFT = re.compile("(?i)eagle|nextn|mtp|dflash|dspark|assistant")


@dataclass(frozen=True)
class Source:
    """Where the names of a program are, as patterns of files in its checkout."""

    parsers: tuple[str, ...] = ()  # files whose calls of `add_argument` name options
    configs: tuple[str, ...] = ()  # files whose classes have annotated fields
    yaml: tuple[str, ...] = ()  # files of settings
    patches: tuple[str, ...] = ()  # patches of Megatron-LM


SOURCES = {
    "slime": Source(("slime/**/arguments.py",), patches=("docker/patch/latest/*.patch",)),
    "miles": Source(("miles/**/arguments.py", "miles/dashboard/args.py"), patches=("docker/**/*.patch",)),
    "megatron-lm": Source(("megatron/training/arguments.py",)),
    "sglang-router": Source(("sglang_router/router_args.py",)),
    "nemo-rl": Source(configs=("nemo_rl/**/*.py",), yaml=("examples/**/*.yaml",)),
    "roll": Source(configs=("roll/**/*.py", "mcore_adapter/**/*.py"), yaml=("examples/**/*.yaml",)),
}
_CONFIG = re.compile("Config|Cfg|Arg(ument)?s|Settings|TypedDict|BaseModel")
_SWITCHES = ("store_true", "store_false", "BooleanOptionalAction")
_PATCHED = re.compile(r"^\+.*add_argument\(\s*['\"]--([\w-]+)['\"](.*)", re.MULTILINE)


def options_of(checkout: Path, source: Source) -> Iterator[tuple[str, bool]]:
    """Every option that these parsers take, and whether it is a switch."""
    for file in _files(checkout, source.parsers):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("add_argument", "reset_arg"):
                names = [_flag(one) for one in node.args]
                actions = [ast.unparse(one.value) for one in node.keywords if one.arg == "action"]
                is_switch = any(word in action for action in actions for word in _SWITCHES)
                names = [name.removeprefix("--") for name in names if name.startswith("--")]
                names += [f"no-{name}" for name in names if any("BooleanOptionalAction" in one for one in actions)]
                yield from ((name, is_switch) for name in names)
            elif called == "ArgumentGroupFactory":
                yield from _fields_as_options(checkout, ast.unparse(node.args[0]))
    for file in _files(checkout, source.patches):
        yield from ((name, "store_" in more) for name, more in _PATCHED.findall(file.read_text()))


def _flag(node: ast.expr) -> str:
    """The text of an option; of `f"--{prefix}policy"` that with the prefix `router-`, as slime and miles ask for it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(one.value if isinstance(one, ast.Constant) else "router-" for one in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _fields_as_options(checkout: Path, name: str) -> Iterator[tuple[str, bool]]:
    """The options that Megatron-LM's ArgumentGroupFactory makes of a class's fields, and of those that it inherits."""
    for node in _classes(checkout / "megatron").get(name, ()):
        for base in node.bases:
            yield from _fields_as_options(checkout, ast.unparse(base))
        for field in (one for one in node.body if isinstance(one, ast.AnnAssign)):
            option, kind = ast.unparse(field.target).replace("_", "-"), ast.unparse(field.annotation)
            names = re.findall(r"'--([\w-]+)'", ast.unparse(field.value)) if field.value else []
            is_on = field.value is not None and re.search(r"^True$|default=True", ast.unparse(field.value))
            prefixed = [f"no-{option}", f"disable-{option}"] if kind == "bool" and is_on else [option]
            yield from ((one, kind == "bool") for one in names or prefixed)


_CLASSES: dict[Path, dict[str, list[ast.ClassDef]]] = {}


def _classes(folder: Path) -> dict[str, list[ast.ClassDef]]:
    if folder not in _CLASSES:
        found: dict[str, list[ast.ClassDef]] = {}
        for file in sorted(folder.rglob("*.py")):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef) and "Config" in node.name:
                    found.setdefault(node.name, []).append(node)
        _CLASSES[folder] = found
    return _CLASSES[folder]


def settings_of(checkout: Path, source: Source) -> Iterator[str]:
    """Every name of a setting: annotated fields of the program's classes, and keys of its own files of settings."""
    for file in _files(checkout, source.configs):
        for node in ast.walk(ast.parse(file.read_text())):
            named = [node.name, *map(ast.unparse, node.bases)] if isinstance(node, ast.ClassDef) else []
            for field in node.body if isinstance(node, ast.ClassDef) and any(map(_CONFIG.search, named)) else ():
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id
    for file in _files(checkout, source.yaml):
        for tree in yaml.load_all(file.read_text(), yaml.BaseLoader):
            yield from _keys(tree)


def _keys(tree: object) -> Iterator[str]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield str(key)
            yield from _keys(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _keys(value)


def _files(checkout: Path, patterns: tuple[str, ...]) -> list[Path]:
    found = [file for pattern in patterns for file in sorted(checkout.glob(pattern))]
    if patterns and not found:
        raise SystemExit(f"{checkout} has no {' or '.join(patterns)}")
    return found


def sglang_options() -> Iterator[tuple[str, bool]]:
    """Every option that the parser of the installed SGLang takes."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    for action in parser._actions:
        yield from ((one[2:], action.nargs == 0) for one in action.option_strings if one.startswith("--"))


def sglang_registry() -> dict[str, list[str]]:
    """What SGLang drafts with, as fields of `EngineRegistry`: by its registry of models and its enum of methods."""
    from sglang.srt.arg_groups.speculative_hook import _resolve_speculative_algorithm_alias
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    names = [one.name for one in SpeculativeAlgorithm if one.is_some()] + ["NEXTN"]
    methods = {name: SpeculativeAlgorithm[_resolve_speculative_algorithm_alias(name, None)] for name in names}
    eagle = {name for name, one in methods.items() if one.is_eagle()}
    of_layers = {name for name in eagle if not methods[name].is_eagle3()}
    others = {name for name, one in methods.items() if one.is_standalone() or one.is_dflash()}
    return {
        "drafts": sorted(filter(_DRAFT.search, ModelRegistry.get_supported_archs())),
        "of_layers": sorted(of_layers),
        "needs_model": sorted(others | (eagle - of_layers)),
        "of_class": sorted(name for name in eagle if not methods[name].is_frozen_kv_mtp()),
    }


def vllm_registry() -> dict[str, list[str]]:
    """The same of vLLM: by its registry of draft models, and by what its own settings say of a method alone."""
    from vllm.config import speculative
    from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS

    refusals = {name: _refusal(speculative.SpeculativeConfig, name) for name in get_args(speculative.SpeculativeMethod)}
    needs_model = {name for name, text in refusals.items() if re.search("without speculative model|'model'", text)}
    return {
        "drafts": sorted(_SPECULATIVE_DECODING_MODELS),
        "of_layers": sorted(name for name, text in refusals.items() if "must be present for mtp" in text),
        "needs_model": sorted(needs_model),
        "of_class": sorted(needs_model & {*get_args(speculative.EagleModelTypes)}),
    }


def _refusal(settings: Any, method: str) -> str:
    """Why these settings refuse a method without a model; empty where they do not."""
    try:
        settings(method=method, num_speculative_tokens=1)
    except (AttributeError, ImportError, ValueError) as error:
        return str(error)
    return ""


REGISTRIES = {"sglang": ("SGLang", sglang_registry), "vllm": ("vLLM", vllm_registry)}


def registry_of(program: str) -> str:
    """The text of an engine's file in `quant/engines/`, with the release that is installed."""
    label, read = REGISTRIES[program]
    return json.dumps({"release": f"{label} {version(program)}", **read()}, indent=1) + "\n"


def write(program: str, release: str, options: dict[str, bool]) -> None:
    """A list: program and release, the names of what takes a value, and behind an empty line those of switches."""
    parts = [sorted(name for name, is_switch in options.items() if is_switch is kind) for kind in (False, True)]
    width = {"width": 120, "break_on_hyphens": False, "break_long_words": False}
    text = "\n\n".join(textwrap.fill(" ".join(part), **width) for part in parts if part)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{program}.txt").write_text(f"# {program} {release}\n{text}\n")
    print(f"{program} {release}: {len(options)} names")


def main() -> None:
    """Writes the list of one program."""
    program, *given = sys.argv[1:]
    if program in REGISTRIES:
        folder = Path(given[0]) if given else ROOT / "converters" / "engines"
        (folder / f"{program}.json").write_text(registry_of(program))
        if program == "sglang" and not given:
            write(program, version("sglang"), dict(sglang_options()))
        return
    checkout, release, source = Path(given[0]), given[1], SOURCES[program]
    names = dict(options_of(checkout, source)) | dict.fromkeys(settings_of(checkout, source), False)
    if program == "roll":
        from transformers import Seq2SeqTrainingArguments

        names |= {one.name: False for one in dataclasses.fields(Seq2SeqTrainingArguments)}
    write(program, release, {name: names[name] for name in names if re.fullmatch(r"_?[A-Za-z][\w-]*", name)})


if __name__ == "__main__":
    main()
