"""slime's own publisher of deltas and SGLang's own receiver of them, which slime patches in, against ckptkit's replay.

`SLIME` names a checkout. Both run as they are, but for what they import from Ray and Megatron, of which they call
nothing here. The writer gets its tensors from a dict.
"""

import importlib.util
import re
import sys
from types import ModuleType
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from support.deltas import raw, trained
from support.models import save, tensors

import ckptkit
from ckptkit.app.api import convert

_UPDATES = "slime/backends/megatron_utils/update_weight"
_RECEIVER = "python/sglang/srt/weight_sync/local_checkpoint.py"


def _module(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def writer(monkeypatch, checkout):
    slime = checkout("SLIME")
    for name in ("ray", "ray.actor", "megatron", "megatron.core", "slime.utils.engine_group_wave", "slime.utils"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    for name in ("slime", "slime.backends", "slime.updates"):
        package = ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    groups, base = ModuleType("groups"), ModuleType("base")
    groups.get_gloo_group = lambda: None
    base.UpdateWeightFromDistributed = object
    monkeypatch.setitem(sys.modules, "slime.utils.distributed_utils", groups)
    monkeypatch.setitem(sys.modules, "slime.updates.update_weight_from_distributed", base)
    disk = _module("slime.utils.disk_delta", slime / "slime/utils/disk_delta.py")
    monkeypatch.setitem(sys.modules, "slime.utils.disk_delta", disk)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield _module("slime.updates.writer", slime / _UPDATES / "update_weight_from_disk_delta.py")
    dist.destroy_process_group()


@pytest.fixture
def receiver(checkout, tmp_path):
    patch = (checkout("SLIME") / "docker/patch/latest/sglang-pull_weights.patch").read_text()
    added = re.search(rf"^\+\+\+ b/{_RECEIVER}\n@@[^\n]*\n((?:\+[^\n]*\n)+)", patch, re.MULTILINE)
    path = tmp_path / "local_checkpoint.py"
    path.write_text("".join(line[1:] + "\n" for line in added[1].splitlines()))
    return _module("local_checkpoint", path)


@pytest.mark.parametrize(("encoding", "algorithm"), [("xor", "xxh3-128"), ("overwrite", "blake3"), ("xor", "adler32")])
def test_what_slime_publishes_is_replayed_as_sglang_applies_it(writer, receiver, tmp_path, encoding, algorithm):
    base, updates = tmp_path / "base", tmp_path / "updates"
    save("qwen2-untied", base)
    states = [tensors(base)]
    publisher = object.__new__(writer.UpdateWeightFromDiskDelta)
    publisher.delta_dir, publisher.delta_encoding = str(updates), encoding
    publisher.checksum_algorithm, publisher._is_pp_src_rank = algorithm, True
    publisher._snapshot = {
        name: torch.frombuffer(bytearray(raw(one)), dtype=torch.uint8).numpy() for name, one in states[0].items()
    }
    for number in range(1, 4):
        states.append(trained(states[-1], number))
        publisher.weight_version = number
        publisher._iter_hf_tensors = states[-1].items
        publisher._publish()
    report = ckptkit.verify(updates, source=base)
    assert (report.status, report.findings) == ("passed", [])
    receiver.pull(str(tmp_path / "local"), str(base), str(updates), 3)
    convert(updates, tmp_path / "full", hf=base)
    local, full = tensors(tmp_path / "local"), tensors(tmp_path / "full")
    assert {name: raw(one) for name, one in full.items()} == {name: raw(one) for name, one in local.items()}
    assert {name: raw(one) for name, one in full.items()} == {name: raw(one) for name, one in states[3].items()}
    assert ckptkit.verify(tmp_path / "local", source=updates, hf=base).status == "passed"
