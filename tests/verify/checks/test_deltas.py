"""CK122, CK123, CK221 and CK222: chains of deltas, sound and broken, and what is made of them."""

import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from mutations.edits import edit_index as edit_weight_map
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.deltas import (
    INDEX,
    digest,
    edit_index,
    encoded,
    packed,
    publish,
    publish_chain,
    raw,
    renumber,
    trained,
    version_at,
)
from support.messages import text_with
from support.models import edit, save, tensors, unequal

import ckptkit
from ckptkit import CkptkitError
from ckptkit.app.api import convert
from ckptkit.app.inspection import inspect
from ckptkit.core.errors import UsageError
from ckptkit.verify.checks.deltas.deltas import count_not_finite

MIXED = ("xor", "overwrite") * 3
NORM, OTHER = "model.norm.weight", "model.other.weight"  # the first is changed by odd steps
FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A base and a chain of six deltas, and the weights of every version."""
    root = tmp_path_factory.mktemp("deltas")
    save("qwen2-untied", root / "base")
    return root, publish_chain(root / "chain", root / "base", MIXED)


@pytest.fixture
def chain(published, tmp_path):
    shutil.copytree(published[0] / "chain", tmp_path / "chain")
    shutil.copytree(published[0] / "base", tmp_path / "base")
    return tmp_path / "chain"


def found(chain):
    return ckptkit.verify(chain, source=chain.parent / "base").findings


def opened(path, name):
    (file,) = (one for one in path.glob("*.safetensors") if name in load_file(one))
    with safe_open(file, "pt") as header:
        return file, load_file(file), header.metadata()


def rewrite(path, name, payload, checksum=None):
    file, stored, metadata = opened(path, name)
    save_file(stored | {name: payload}, file, metadata | ({name: checksum} if checksum else {}))


def test_a_chain_of_six_deltas_is_clean_and_every_change_is_replayed(published):
    root, states = published
    report = ckptkit.verify(root / "chain", source=root / "base")
    assert (report.status, report.findings, report.asked) == ("passed", [], ["deltas"])
    changes = sum(raw(old[name]) != raw(new[name]) for old, new in pairwise(states) for name in old)
    compared = {one.code: one.tensors_compared for one in report.checks}
    assert compared == {"CK122": 6, "CK123": changes, "CK221": changes, "CK222": changes}


def twice(chain, states):
    path = version_at(chain, 1)
    _, stored, _ = opened(path, NORM)
    checksum = {NORM: digest("xxh3-128", raw(states[1][NORM]))}
    save_file({NORM: stored[NORM]}, path / "model-00002-of-00003.safetensors", metadata=checksum)


def renamed(chain, states):
    path = version_at(chain, 3)
    file, stored, metadata = opened(path, NORM)
    stored[OTHER], metadata[OTHER] = stored.pop(NORM), metadata.pop(NORM)
    save_file(stored, file, metadata)
    edit_weight_map(path, lambda files: files.update({OTHER: files.pop(NORM)}))


def other_base(chain, states):
    changed = states[0][NORM].clone()
    changed[5] += 1
    edit(chain.parent / "base", NORM, changed)


def wider(chain, states):
    old, new = (states[number][NORM].float() for number in (2, 3))
    rewrite(version_at(chain, 3), NORM, packed(encoded("xor", raw(old), raw(new))), digest("xxh3-128", raw(new)))


def overwriting(chain, states):
    """Version 3 in the other encoding, which is sound."""
    edit_index(version_at(chain, 3), delta_encoding="overwrite")
    for name, old in states[2].items():
        new = states[3][name]
        if raw(old) != raw(new):
            rewrite(version_at(chain, 3), name, packed(encoded("overwrite", raw(old), raw(new))))


def out_of_range(chain, states):
    """The delta of a tensor with more rows: its last position lies outside."""
    overwriting(chain, states)
    old, new = raw(states[2][NORM]) + b"\0\0", raw(states[3][NORM]) + b"\1\0"
    rewrite(version_at(chain, 3), NORM, packed(encoded("overwrite", old, new)))


def cut(chain, states):
    payload = encoded("xor", raw(states[2][NORM]), raw(states[3][NORM]))
    rewrite(version_at(chain, 3), NORM, packed(payload)[:-6].clone())


def of_version(number, change):
    return lambda chain, _: change(version_at(chain, number))


SIZE = 256  # bytes of NORM
# What is done, the check that finds it, and file, tensor (None: any) and words of its first finding.
FAULTS = {
    "a gap": (of_version(3, shutil.rmtree), "CK122", "weight_v000003", None, "missing"),
    "of another run": (
        of_version(3, lambda path: edit_index(path, base_version="000007")),
        *("CK122", f"weight_v000003/{INDEX}", None, "'000003' '000007'"),
    ),
    "no index": (
        of_version(6, lambda path: (path / INDEX).unlink()),
        *("CK122", f"weight_v000006/{INDEX}", None, "file"),
    ),
    "another encoding": (
        of_version(3, lambda path: edit_index(path, delta_encoding="sub")),
        *("CK122", f"weight_v000003/{INDEX}", None, "'sub'"),
    ),
    "cut short": (
        of_version(4, lambda path: os.truncate(path / FIRST, (path / FIRST).stat().st_size - 9)),
        *("CK123", f"weight_v000004/{FIRST}", None, "truncated"),
    ),
    "a file lost": (
        of_version(4, lambda path: (path / FIRST).unlink()),
        *("CK123", f"weight_v000004/{INDEX}", None, "missing"),
    ),
    "not a payload": (
        of_version(3, lambda path: rewrite(path, NORM, torch.zeros(8))),
        *("CK123", "weight_v000003/", NORM, "float32 [8]"),
    ),
    "a name that the base lacks": (renamed, "CK123", "weight_v000003/", OTHER, "tensor"),
    "in two files": (twice, "CK123", f"weight_v000001/{INDEX}", NORM, "2 files"),
    "in no index": (
        of_version(1, lambda path: edit_weight_map(path, lambda files: files.pop(NORM))),
        *("CK123", f"weight_v000001/{INDEX}", NORM, "unlisted"),
    ),
    "an earlier version repeated": (
        lambda chain, _: renumber(chain, 1, 3),
        "CK221",
        "weight_v000003/",
        None,
        "checksum",
    ),
    "another base": (other_base, "CK221", "weight_v000001/", NORM, "checksum"),
    "another dtype": (wider, "CK221", "weight_v000003/", NORM, f"{2 * SIZE} {SIZE}"),
    "more rows": (out_of_range, "CK221", "weight_v000003/", NORM, f"{SIZE} {SIZE}"),
    "not compressed": (
        of_version(3, lambda path: rewrite(path, NORM, torch.full((40,), 7, dtype=torch.uint8))),
        *("CK221", "weight_v000003/", NORM, "zstd"),
    ),
    "a payload cut": (cut, "CK221", "weight_v000003/", NORM, "payload"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_with_file_and_tensor_and_nothing_is_made_of_the_chain(fault, published, chain):
    damage, code, file, tensor, actual = FAULTS[fault]
    damage(chain, published[1])
    first, *others = found(chain)
    assert (first.code, {one.code for one in others} <= {code}) == (code, True)
    assert str(first.file).startswith(str(chain / file))
    assert tensor in (None, first.tensor)
    assert first.actual == text_with(actual)
    assert first.hint
    with pytest.raises(CkptkitError, match="weight_v00000"):
        convert(chain, chain.parent / "full", hf=chain.parent / "base")
    assert not [one.name for one in chain.parent.iterdir() if one.name.startswith("full")]


def test_a_delta_that_changes_nothing_is_found(published, chain):
    """It leads to the right bytes all the same."""
    for number in range(3, 7):
        shutil.rmtree(version_at(chain, number))
    renumber(chain, 2, 3)
    (first, *_) = found(chain)
    assert (first.code, Path(first.file or "").parent) == ("CK221", version_at(chain, 3))
    convert(chain, chain.parent / "full", hf=chain.parent / "base")
    assert unequal(chain.parent / "full", published[1][2]) == []


@pytest.mark.parametrize(("encoding", "value"), [("xor", float("nan")), ("overwrite", float("inf"))])
def test_a_number_that_a_delta_makes_nan_is_found_and_one_of_the_base_is_not(published, chain, encoding, value):
    states = published[1]
    new = {name: one.clone() for name, one in states[6].items()}
    new[NORM][3:5] = value
    publish(chain, 7, states[6], new, encoding, "blake3")
    (finding,) = found(chain)
    assert (finding.code, finding.tensor) == ("CK222", NORM)
    assert Path(finding.file or "").parent == version_at(chain, 7)
    # A later version that leaves them alone is sound on a base that has them.
    other = chain.parent / "other"
    other.mkdir()
    convert(chain, other / "base", hf=chain.parent / "base")
    after = trained(new, 1)
    publish(other / "chain", 1, new, after, encoding, "adler32")
    assert raw(new[NORM]) != raw(after[NORM])
    assert found(other / "chain") == []


def test_numbers_that_are_not_finite_are_counted_as_torch_counts_them():
    """Every bit pattern of the short dtypes."""
    for name in ("bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu"):
        dtype = getattr(torch, name)
        bits = torch.arange(1 << 8 * dtype.itemsize).to(torch.int16 if dtype.itemsize > 1 else torch.uint8)
        assert count_not_finite(bits.view(dtype), name) == int((~torch.isfinite(bits.view(dtype).float())).sum()) > 0
    infinity = float("inf")
    for name in ("float32", "float64"):
        numbers = [0.0, -0.0, 1e38, -1e38, 1e-45, infinity, -infinity, float("nan")]
        assert count_not_finite(torch.tensor(numbers, dtype=getattr(torch, name)), name) == 3


def test_a_delta_without_changes_is_sound(published, chain):
    """A step with a learning rate of zero; its index has an empty weight_map, and there is no file."""
    states = published[1]
    publish(chain, 7, states[6], states[6])
    publish(chain, 8, states[6], trained(states[6], 1))
    assert found(chain) == []


def test_a_full_version_starts_the_chain_anew(published, chain):
    states = published[1]
    convert(version_at(chain, 4), chain.parent / "full", hf=chain.parent / "base")
    for number in (1, 3, 4):  # what is older may be pruned
        shutil.rmtree(version_at(chain, number))
    (chain.parent / "full").rename(version_at(chain, 4))
    report = ckptkit.verify(chain)
    assert (report.status, report.findings) == ("passed", [])
    assert any("weight_v000004" in line for line in report.facts["notes"])
    convert(chain, chain.parent / "made")
    assert raw(tensors(chain.parent / "made")[NORM]) == raw(states[6][NORM])


def test_without_a_base_order_and_files_are_checked_and_nothing_is_replayed(chain):
    report = ckptkit.verify(chain)
    assert [one.code for one in report.checks] == ["CK122", "CK123"]
    assert report.facts["not applicable"] == [text_with("CK221 CK222 --source")]
    with pytest.raises(UsageError, match="deltas"):
        convert(chain, chain.parent / "full")


def test_options_about_a_full_checkpoint_are_refused(chain):
    base = chain.parent / "base"
    with pytest.raises(UsageError, match="--source"):
        ckptkit.verify(chain, source=base, against=frozenset({"sglang"}))
    with pytest.raises(UsageError, match="deltas"):
        convert(chain, chain.parent / "full", hf=base, dialect="mcore")


def test_a_delta_of_another_encoder_is_named(chain):
    (version_at(chain, 6) / INDEX).unlink()
    (version_at(chain, 6) / "manifest.json").write_text("{}")
    report = ckptkit.verify(chain, source=chain.parent / "base")
    assert report.status == "inconclusive"
    assert "GPU encoder" in report.reasons[0]


def test_inspect_says_what_a_chain_holds(published):
    root, states = published
    facts = inspect(root / "chain")
    assert facts["format"] == text_with("deltas slime miles vime")
    assert facts["encoding"] == "overwrite, xor"
    assert [line.partition(":")[0] for line in facts["versions"]] == ["1", "2", "3", "4", "5", "6"]
    assert inspect(root / "chain", hf=root / "base")["tensors"] == len(states[0])


def test_a_local_checkpoint_that_missed_an_update_is_found(published, tmp_path):
    """slime#2104: an engine could not apply a delta, nobody looked at its answer, and later ones were applied."""
    root, states = published
    convert(root / "chain", tmp_path / "local", hf=root / "base")
    edit(tmp_path / "local", NORM, states[4][NORM])
    errors = ckptkit.verify(tmp_path / "local", root / "chain", root / "base").findings
    assert {(one.code, one.tensor) for one in errors} == {("CK202", NORM)}
