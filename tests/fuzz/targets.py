"""The parsers, each as a function of bytes that returns, or raises only what its caller expects of bad input."""

import json
import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from io import BytesIO
from itertools import islice
from pathlib import Path
from unittest.mock import patch
from zipfile import ZIP_STORED, ZipFile

import safetensors

from ckptkit.converters.planner import dims_of, mappings_of, rules_of
from ckptkit.core import json_text
from ckptkit.core.errors import CkptkitError
from ckptkit.core.installation import program_version
from ckptkit.formats.detect import TRACKER, tracked_iteration, tracker_fault
from ckptkit.formats.hf.reader import INDEX, SINGLE, HfCheckpoint, read_json
from ckptkit.formats.hf.shard import scan_shard
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.formats.torch_save import unpickle
from ckptkit.formats.torch_save.blob import Blob
from ckptkit.formats.torch_save.saved_file import SavedFile
from ckptkit.quant.patterns import check_entries, matcher
from ckptkit.transfer.manifest import read_manifest
from ckptkit.verify.launch.job import Launch
from ckptkit.verify.launch.options.arguments import parse_arguments
from ckptkit.verify.launch.settings.config import Config, UnresolvedError
from ckptkit.verify.launch.settings.files import compose
from ckptkit.verify.launch.settings.overrides import apply_overrides
from ckptkit.verify.launch.shell import values
from ckptkit.verify.launch.shell.read import read_script
from ckptkit.verify.launch.stacks.which import read_job
from ckptkit.verify.launch.words import LaunchText, Word
from ckptkit.verify.triage.triage import triage

Unit = Callable[[bytes], None]
_NAMES = ("model.layers.0.mlp.gate", "lm_head", "model.layers.11.self_attn.q_proj.weight", "a", "")


@dataclass(frozen=True)
class Target:
    """A parser. `make` prepares a scratch directory and returns what runs it once; `is_json`: mutate values too."""

    make: Callable[[Path], Unit]
    is_json: bool = False
    largest: int = 2048


def _plain(run):
    """For a parser that needs nothing in its scratch directory."""
    return lambda folder: partial(run, folder)


def _json(_, data):
    try:
        found = json_text.parse(data)
    except ValueError:
        return
    assert repr(found) == repr(json.loads(data.decode()))


def _shard(folder, data):
    """A header as it is, with the number of bytes behind it in the first two bytes."""
    file = folder / SINGLE
    size, header = int.from_bytes(data[:2], "little"), data[2:]
    content = struct.pack("<Q", len(header)) + header + bytes(size)
    file.write_bytes(content)
    shard = scan_shard(file)
    if shard.readable and not shard.faults:
        theirs = safetensors.deserialize(content)
        assert {name: tuple(one["shape"]) for name, one in theirs} == {
            name: spec.shape for name, spec in shard.specs.items()
        }
    else:
        with suppress(CkptkitError):
            shard.sound()
            raise AssertionError("faults that are not errors")


def _shard_bytes(folder, data):
    file = folder / SINGLE
    file.write_bytes(data)
    scan_shard(file)


def _index(folder):
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model-1.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    (folder / "config.json").write_text("{}")

    def unit(data):
        (folder / INDEX).write_bytes(data)
        with suppress(CkptkitError):
            assert dict(HfCheckpoint(folder).specs).keys() <= {"a"}

    return unit


def _pickle(_, data):
    with suppress(pickle.UnpicklingError):
        unpickle.loads(data)
    with suppress(pickle.UnpicklingError):
        unpickle.loads(data, {"collections.OrderedDict", "torch._utils._rebuild_tensor_v2"}.__contains__)


def _read_saved(file, data):
    """Reads a file of torch.save in memory, as a chunk of torch_dist, and from the disk, as a rank's file."""
    memory = memoryview(bytearray(data))
    blob = Blob(file, 0, len(data), memory)
    for read in (lambda: blob.tensor_in(memory, "float32", (2, 3)), lambda: blob.dense("float32", (2, 3))):
        with suppress(CkptkitError):
            read()
    file.write_bytes(data)
    with suppress(CkptkitError):
        saved = SavedFile(file)
        content = saved.content
        for value in islice(content.values(), 8) if isinstance(content, dict) else (content,):
            with suppress(CkptkitError):
                saved.read(saved.tensor(value, "x"))


def _torch_save(folder):
    """The pickle within a well-formed file of torch.save, beside a storage of 24 bytes; no checksum stops it."""
    file = folder / "saved.pt"
    import_module("torch")  # may take a minute, which would be the time of an input

    def unit(data):
        made = BytesIO()
        with ZipFile(made, "w", ZIP_STORED) as archive:
            archive.writestr("x/data.pkl", data)
            archive.writestr("x/data/0", bytes(24))
        _read_saved(file, made.getvalue())

    return unit


def _zip(folder):
    file = folder / "saved.pt"
    import_module("torch")  # may take a minute, which would be the time of an input

    def unit(data):
        _read_saved(file, data)

    return unit


def _metadata(folder, data):
    (folder / ".metadata").write_bytes(data)
    with suppress(CkptkitError):
        found = TorchDistCheckpoint(folder)
        for name in islice(found.specs, 8):
            with suppress(CkptkitError):
                found.extents(name)
            with suppress(CkptkitError):
                found.stretch(name, 0)
            list(found.byte_ranges([name]))


def _tracker(folder):
    (folder / "iter_0000007").mkdir()
    (folder / "release").mkdir()

    def unit(data):
        (folder / TRACKER).write_bytes(data)
        with suppress(CkptkitError):
            assert tracker_fault(tracked_iteration(folder)) is None
        tracker_fault(folder / "release")

    return unit


def _manifest(folder, data):
    (folder / "ckptkit.json").write_bytes(data)
    with suppress(CkptkitError):
        read_manifest(folder / "ckptkit.json")


def _patterns(_, data):
    entry, *names = data.decode(errors="replace").split("\n")
    with suppress(CkptkitError):
        check_entries([entry], "ignore")
        match = matcher(entry)
        for name in (*names, *_NAMES):
            match(name)


def _config(folder, data):
    file = folder / "config.json"
    file.write_bytes(data)
    with suppress(CkptkitError):
        config = read_json(file)
        dims_of(config)
        mappings_of(config)
        for rule in islice(rules_of(config), 40):
            assert all(min(shape, default=1) >= 0 for shape in (rule.megatron_shape, *rule.hf.values()))


def _shell(_, data):
    # A loop without an end takes seconds up to the real bound; a smaller one shows the same.
    with patch.object(values, "MAX_STEPS", 300), suppress(CkptkitError):
        found = read_script(None, data.decode(errors="replace"))
        parse_arguments(found.words)


def _settings(folder, data):
    """A YAML file, and behind a line `%%` overrides, one a line."""
    file = folder / "job.yaml"
    yaml, _, overrides = data.partition(b"\n%%\n")
    file.write_bytes(yaml)
    words = [Word(one) for one in overrides.decode(errors="replace").split("\n")]
    with suppress(CkptkitError):
        tree, _ = apply_overrides(compose(file).tree, words)
        config = Config(tree, {"HOME": "/root"})
        for key in islice(config.names(), 50):
            with suppress(UnresolvedError):
                config.find(key)
    with suppress(CkptkitError):
        read_job(Launch(LaunchText(tuple(words)), environment={"HOME": "/root"}), file)


def _triage(folder):
    file = folder / "job.log"
    module = import_module(triage.__module__)
    installed = cache(program_version)  # which parses the metadata of the package each time

    def unit(data):
        file.write_bytes(data)
        with patch.object(module, "program_version", installed), suppress(CkptkitError):
            found = triage([file])
            assert found.lines <= data.count(b"\n") + 1
            json.dumps(found.to_json())
            list(module.triage_lines(found))

    return unit


TARGETS = {
    "json": Target(_plain(_json), is_json=True),
    "shard": Target(_plain(_shard)),
    "shard-bytes": Target(_plain(_shard_bytes)),
    "index": Target(_index, is_json=True),
    "pickle": Target(_plain(_pickle)),
    "torch-save": Target(_torch_save),
    "zip": Target(_zip),
    "metadata": Target(_plain(_metadata), largest=4096),
    "tracker": Target(_tracker, largest=300),
    "manifest": Target(_plain(_manifest), is_json=True),
    "patterns": Target(_plain(_patterns), largest=120),
    "config": Target(_plain(_config), is_json=True),
    "shell": Target(_plain(_shell), largest=512),
    "settings": Target(_plain(_settings), largest=1024),
    "triage": Target(_triage, largest=1024),
}
