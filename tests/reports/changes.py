"""Changes that several cases share: of tensors, names, config.json and what is quantized."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutations.edits import INDEX, edit_config, edit_json, edit_stored, names, rename, replace, tensor, write_index
from support.floats import SPELLINGS, Spelling, write
from torch import Tensor

from ckptkit.app.api import quantize
from ckptkit.quant.formats.scheme import QuantScheme
from reports.report import SOURCE, Change


def on_checkpoint(change: Callable[[Path], object]) -> Change:
    return lambda work: change(work / "CKPT")


def steps(*changes: Change) -> Change:
    return lambda work: [change(work) for change in changes]


def matching(path: Path, *patterns: str) -> list[str]:
    return [name for name in names(path, "") if any(re.search(pattern, name) for pattern in patterns)]


def dropped(*patterns: str) -> Change:
    return on_checkpoint(lambda path: replace(path, {}, matching(path, *patterns)))


def without_tensors(*patterns: str) -> Change:
    """Tensors are not stored; index and the numbers of files agree."""
    return steps(dropped(*patterns), on_checkpoint(number_files))


def number_files(path: Path) -> None:
    """Numbers the files anew, without those that hold nothing."""
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    for file in path.glob("*.safetensors"):
        if file.name not in weight_map.values():
            file.unlink()
    files = sorted(path.glob("*.safetensors"))
    new = {file.name: f"model-{number:05d}-of-{len(files):05d}.safetensors" for number, file in enumerate(files, 1)}
    for file in files:
        file.rename(path / new[file.name])
    write_index(path, {name: new[file] for name, file in weight_map.items()})


def changed(pattern: str, change: Callable[[Tensor], Tensor]) -> Change:
    return on_checkpoint(
        lambda path: replace(path, {name: change(tensor(path, name)).contiguous() for name in matching(path, pattern)})
    )


def stored(key: str, change: Callable[[Tensor], Tensor], experts: int = 1) -> Change:
    """A tensor of a Megatron checkpoint is changed, for the first experts of it."""
    return on_checkpoint(lambda path: [edit_stored(path, key, change, expert) for expert in range(experts)])


def renamed(new_name: Callable[[str], str]) -> Change:
    return on_checkpoint(lambda path: rename(path, new_name))


def config(change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda work: edit_json(work / "CKPT" / "config.json", change)


def settings(**values: Any) -> Change:
    return on_checkpoint(lambda path: edit_config(path, **values))


def quantization(change: Callable[[dict[str, Any]], object]) -> Change:
    return config(lambda content: change(content["quantization_config"]))


def as_release(work: Path) -> None:
    (work / SOURCE).unlink()
    shutil.copytree(work / "CKPT", work / SOURCE)


def stored_as(spelling: str | Spelling, pattern: str | None = None) -> Change:
    """The release in a low precision; `pattern`: of the whole names of what is quantized."""
    one = SPELLINGS[spelling] if isinstance(spelling, str) else spelling
    chosen = None if pattern is None else lambda name: re.fullmatch(pattern, name) is not None
    return lambda work: write((work / SOURCE).resolve(), work / "CKPT", one, chosen)


def int4_without(*ignore: str, group: int | None = 32) -> Change:
    return lambda work: quantize(work / SOURCE, work / "CKPT", QuantScheme(group, "qmax7", ignore))
