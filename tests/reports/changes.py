"""Changes that several cases share: of tensors, names, config.json and what is quantized."""

import json
import re
import shutil

from mutations.edits import INDEX, edit_config, edit_json, edit_stored, names, rename, replace, tensor, write_index
from support.floats import SPELLINGS, write

from ckptkit.app.api import quantize
from ckptkit.quant.formats.scheme import QuantScheme
from reports.report import SOURCE


def on_checkpoint(change):
    return lambda work: change(work / "CKPT")


def steps(*changes):
    return lambda work: [change(work) for change in changes]


def matching(path, *patterns):
    return [name for name in names(path, "") if any(re.search(pattern, name) for pattern in patterns)]


def dropped(*patterns):
    return on_checkpoint(lambda path: replace(path, {}, matching(path, *patterns)))


def without_tensors(*patterns):
    """Tensors are not stored; index and the numbers of files agree."""
    return steps(dropped(*patterns), on_checkpoint(number_files))


def number_files(path):
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


def changed(pattern, change):
    return on_checkpoint(
        lambda path: replace(path, {name: change(tensor(path, name)).contiguous() for name in matching(path, pattern)})
    )


def stored(key, change, experts=1):
    """A tensor of a Megatron checkpoint is changed, for the first experts of it."""
    return on_checkpoint(lambda path: [edit_stored(path, key, change, expert) for expert in range(experts)])


def renamed(new_name):
    return on_checkpoint(lambda path: rename(path, new_name))


def config(change):
    return lambda work: edit_json(work / "CKPT" / "config.json", change)


def settings(**values):
    return on_checkpoint(lambda path: edit_config(path, **values))


def quantization(change):
    return config(lambda content: change(content["quantization_config"]))


def as_release(work):
    (work / SOURCE).unlink()
    shutil.copytree(work / "CKPT", work / SOURCE)


def stored_as(spelling, pattern=None):
    """The release in a low precision; `pattern`: of the whole names of what is quantized."""
    one = SPELLINGS[spelling] if isinstance(spelling, str) else spelling
    chosen = None if pattern is None else lambda name: re.fullmatch(pattern, name) is not None
    return lambda work: write((work / SOURCE).resolve(), work / "CKPT", one, chosen)


def int4_without(*ignore, group=32):
    return lambda work: quantize(work / SOURCE, work / "CKPT", QuantScheme(group, "qmax7", ignore))
