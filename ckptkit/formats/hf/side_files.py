"""Side files of an HF checkpoint (config, tokenizer, templates, code), and the layout of its shards."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import COMPUTED
from ckptkit.core.errors import CkptkitError, MissingError
from ckptkit.core.printable import shortened
from ckptkit.core.specs import TensorSpec, summarize
from ckptkit.formats.detect import LEGACY_RANK, LOADED, SIGNATURE_ENDING, is_loaded, locate, require_own_files
from ckptkit.formats.detect import MANIFEST as MANIFEST
from ckptkit.formats.hf.reader import MODELOPT_CONFIG, QUANTIZATION_KEYS, read_json
from ckptkit.storage.directory import Directory, directory
from ckptkit.storage.links import fetch_again, target_of
from ckptkit.storage.regular import open_regular
from ckptkit.storage.tree import files_below

MAX_SIDE_FILE_BYTES = 16 << 30
_OWN = {Path(MANIFEST), Path(MANIFEST + SIGNATURE_ENDING)}
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".distcp")


def side_files(root: Path, within: Path | None = None) -> list[Path]:
    """Every file of an HF directory except weights, hidden files and broken links that no loader reads.

    `within`: the checkpoint that contains the directory. Raises CkptkitError like `files_below` and `require_utf8`, and
    for a broken link or a folder instead of a file that loaders read.
    """
    if folders := [name for name in sorted(LOADED) if (root / name).is_dir()]:
        raise CkptkitError(f"{root / folders[0]} is not a regular file", "replace it with the file of the release")
    files = [file for file in files_below(root, within) if not is_hidden(str(file))]
    links = {file: target for file in files if (target := target_of(root / file)) is not None}
    for file in filter(is_read, links):
        raise MissingError(f"{root / file} is a broken link to {links[file]}", fetch_again((root / file).parent))
    omitted = {*links, *_OWN}
    return require_utf8(root, [file for file in files if not is_weight(file.name) and file not in omitted])


def is_read(file: Path) -> bool:
    """Whether loaders or ckptkit read a file (relative to an HF directory): weights, settings, templates, code."""
    return file in _OWN or is_loaded(file) or (len(file.parts) == 1 and is_weight(file.name))


def require_utf8(root: Path, files: Sequence[Path]) -> list[Path]:
    """These files. Raises CkptkitError for a name that is not UTF-8, as JSON requires."""
    for file in files:
        if (name := os.fsencode(file).decode(errors="backslashreplace")) != str(file):
            message = f"{root} contains a file with a name that is not UTF-8, {name}"
            raise CkptkitError(message, "rename the file: a manifest cannot contain its name")
    return list(files)


def is_hidden(name: str) -> bool:
    """Whether a file (relative to its HF directory) or one of its folders is hidden, so not part of the model."""
    return any(part.startswith(".") for part in name.split("/"))


def is_weight(name: str) -> bool:
    """Whether a file has weights in any format, or is their index."""
    return name.endswith(_WEIGHTS)


def copy_files(root: Path, files: Sequence[Path], target: Path) -> None:
    """Copies files (relative to `root`) byte for byte. Raises CkptkitError if one cannot be read."""
    for relative in files:
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        with (target / relative).open("wb") as copied:
            for piece in pieces_of(root / relative):
                copied.write(piece)


def pieces_of(path: Path) -> Iterator[bytes]:
    """The bytes of a side file, 1 MiB at a time. Raises CkptkitError if it is unreadable or too large."""
    try:
        with open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_SIDE_FILE_BYTES:
                raise OSError(errno.EFBIG, f"it has {size} bytes, but ckptkit reads at most {MAX_SIDE_FILE_BYTES}")
            while piece := file.read(1 << 20):
                yield piece
    except OSError as error:
        raise CkptkitError(f"{path}: {error.strerror}", "make this file of the checkpoint readable") from error


def quantization_of(config: Mapping[str, Any]) -> Any:
    """The quantization of an HF config's weights under any key, or None, also if only the cache is quantized."""
    content = declared_quantization(config)
    if isinstance(content, Mapping) and content.get("quant_method") == "compressed-tensors":
        return None if content.get("kv_cache_scheme") and not content.get("config_groups") else content
    return content


def declared_quantization(config: Mapping[str, Any]) -> Any:
    """An HF config's declaration of quantized weights or a quantized cache, or None."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    return next((part[key] for part in parts for key in QUANTIZATION_KEYS if part.get(key) is not None), None)


def describe_quantization(config: Mapping[str, Any]) -> str:
    """A clause with the quantization that the result of `read_config` declares, and its key."""
    places = [*_places(config)]
    if not places:
        return "config.json has no quantization_config"
    place, content = next(((place, one) for place, one in places if one is declared_quantization(config)), places[0])
    if place.count(".") > 1 or (place.count(".") and not place.startswith("text_config.")):
        return f"config.json has {place}, where no engine reads it"
    if not isinstance(content, Mapping) or not content:
        return f"{place} is {shortened(content)}"
    if quantization_of(config) is None:
        return f"{place} declares a quantized cache and no quantized weights"
    keys = {key: content[key] for key in ("quant_method", "quant_algo", "format") if content.get(key) is not None}
    declared = ", ".join(f"{key} {shortened(value)}" for key, value in keys.items())
    return f"{place} declares {declared or 'no quant_method'}"


def _places(config: Mapping[str, Any], prefix: str = "", depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Every key of a config, at most `depth` objects deep, that may declare quantized weights, with its value."""
    for key, value in config.items():
        if key in QUANTIZATION_KEYS and value is not None:
            yield f"{prefix}{key}", value
        elif depth and isinstance(value, Mapping):
            yield from _places(value, f"{prefix}{key}.", depth - 1)


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Whether an HF config declares quantized weights; null means that they are not."""
    return quantization_of(config) is not None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model with unquantized weights."""
    plain = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    if isinstance(text := plain.get("text_config"), Mapping):
        plain["text_config"] = {key: value for key, value in text.items() if key not in QUANTIZATION_KEYS}
    return plain


_TIE = "tie_word_embeddings"
_MORE_KEYS = ("expert_dtype",)  # outside the declaration: the format of DeepSeek-V4's experts


def write_config(target: Path, config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> None:
    """Updates dtype, quantization and ties in config.json for new weights, and removes ModelOpt's file about others."""
    before = read_json(target / "config.json")
    after = without_quantization(deepcopy(before))
    method = quantization_of(config).get("quant_method") if isinstance(quantization_of(config), Mapping) else None
    if method != "modelopt":
        (target / MODELOPT_CONFIG).unlink(missing_ok=True)
    if (declared := declared_quantization(config)) is not None:
        after["quantization_config"] = declared
        after |= {key: config[key] for key in _MORE_KEYS if key in config}
    if config.get(_TIE) is False and before.get(_TIE) is not False:  # an adapter untied them
        text = after.get("text_config")
        for part in (after, *([text] if isinstance(text, dict) and _TIE in text else [])):
            part[_TIE] = False
    if dtype := main_dtype(specs):
        inner = [thinker] if isinstance(thinker := after.get("thinker_config"), dict) else []
        parts = [one for part in (after, *inner) for one in (part, part.get("text_config")) if isinstance(one, dict)]
        keys = [(part, key) for part in parts for key in ("dtype", "torch_dtype") if part.get(key) is not None]
        for part, key in keys or [(after, "dtype")]:
            part[key] = dtype
    if after != before:
        (target / "config.json").write_text(json.dumps(after, indent=2) + "\n")


def main_dtype(specs: Mapping[str, TensorSpec]) -> str | None:
    """The floating dtype of most bytes, or None without floating tensors."""
    sizes = Counter[str]()
    for spec in specs.values():
        if spec.dtype in COMPUTED:
            sizes[spec.dtype] += spec.nbytes
    return max(sizes, key=sizes.__getitem__, default=None)


def stored_layout(manifest: Path) -> dict[str, list[str]] | None:
    """The layout of the release's shards, from the manifest next to Megatron's weights, or None without one."""
    if not manifest.exists():
        return None
    layout = read_json(manifest).get("hf_layout")
    if not isinstance(layout, dict) or not all(isinstance(names, list) for names in layout.values()):
        raise CkptkitError(f"{manifest} has no valid hf_layout", "pass the HF directory of this model with --hf")
    for file in layout:
        if Path(file).name != file or not file.endswith(".safetensors"):
            message = f"{manifest} assigns tensors to {file!r}, which is not the name of a safetensors file"
            raise CkptkitError(message, "pass the HF directory of this model with --hf")
    return {file: [str(name) for name in names] for file, names in layout.items()}


def layout_for(checkpoint: Checkpoint, layout: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """`layout` if it names exactly the tensors of `checkpoint`. Raises CkptkitError otherwise."""
    names = [name for file in layout.values() for name in file]
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        message = f"the shard layout contains tensors twice: {summarize(twice)}"
        raise CkptkitError(message, "pass the HF directory of this model with --hf")
    if differ := sorted(set(names) ^ set(checkpoint.specs)):
        message = f"the shards of the reference contain other tensors than this model: {summarize(differ)}"
        raise CkptkitError(message, "pass the HF directory of this model with --hf")
    return dict(layout)


def hf_home(path: Path, hf: str | Path | Directory | None) -> Directory:
    """The HF directory of the iteration at `path`. Raises CkptkitError if `hf` names one that does not exist."""
    if not hf:
        return Directory(path.parent / "hf")
    home = directory(hf)
    require_own_files(home.path)
    if not (home.path / "config.json").exists():
        raise MissingError(f"{home} has no config.json", "pass the HF directory of this model with --hf")
    return home


def config_in(home: Path | Directory, path: Path) -> Mapping[str, Any]:
    """The config in `home` for the weights at `path`. Raises CkptkitError if there is none."""
    home = directory(home)
    file = home.path / "config.json"
    if not file.exists():
        message = f"{path} has no HF config of this model stored next to it"
        raise MissingError(message, "pass the HF directory of this model with --hf")
    # Megatron's weights are not quantized, even if `home` is an INT4 release of the model.
    return without_quantization(read_json(file, home.at("config.json")))


_NAMES = frozenset({".metadata", MANIFEST, MANIFEST + SIGNATURE_ENDING})


def is_own(relative: Path) -> bool:
    """Whether loaders read a file (relative to `weights_at`); not a log or another checkpoint in a folder."""
    *folders, name = relative.parts
    if folders and LEGACY_RANK.fullmatch(folders[0]):
        return len(folders) == 1
    return is_loaded(relative) or (not folders and (name in _NAMES or is_weight(name)))


def weights_at(path: Path) -> Path:
    """The directory of the weights of the checkpoint at `path`, or `path` if there is none."""
    try:
        return locate(path).path
    except CkptkitError:
        return path
