"""CK121, CK213 and CK214: optimizer state as megatron-core's own distributed optimizer saves it, sound and not.

Single faults of state that is named by parameter are mutations (`tests/mutations/optimizer.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mutations.edits import saved as blob_of
from support import models
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from ckptkit.formats.torch_dist.reader import read_metadata
from ckptkit.formats.torch_dist.training_state import is_flattened, is_padding, unflattened
from verify.check import Tally
from verify.checks.headers.optimizer import no_optimizer, optimizer_whole
from verify.checks.values.optimizer import masters_round, optimizer_sound
from verify.evidence.subject import Subject
from verify.report import Finding

BUCKETS, NAMED, SEVERAL = (
    "dense, optimizer by bucket",
    "experts, optimizer by parameter",
    "dense, optimizer of several buckets",
)
CHECKS = (optimizer_whole, optimizer_sound, masters_round)


def found(root: Path) -> tuple[list[Finding], list[int]]:
    """What the three checks find, and how much each of them looked at."""
    subject, tallies = Subject(root), [Tally() for _ in CHECKS]
    findings = [one for check, tally in zip(CHECKS, tallies, strict=True) for one in check(subject, tally)]
    return findings, [tally.tensors for tally in tallies]


@pytest.mark.parametrize(
    ("label", "looked_at"),
    [
        # Two tensor parallel ranks have a bucket each, of three kinds; masters are compared as a whole.
        (BUCKETS, [2, 2 * 3, 1]),
        # 141 keys, of which 10 layers have two for their 12 experts.
        (NAMED, [141, 3 * (121 + 240), 121 + 240]),
    ],
)
def test_what_megatron_saves_is_sound(saved: Path, label: str, looked_at: list[int]) -> None:
    assert found(saved / label) == ([], looked_at)


def test_parameters_that_megatron_takes_from_the_wrong_place_are_found(saved: Path) -> None:
    """Releases up to megatron-core 0.19.2 count a bucket's padding, which the gathered state does not have."""
    findings, _ = found(saved / SEVERAL)
    assert {(one.code, one.severity) for one in findings} == {("CK214", "error")}
    last = {one.tensor or "" for one in findings}
    assert any(name.startswith("optimizer.state.param.decoder.layers.") for name in last)
    # The first bucket lies where it should.
    assert not any("output_layer" in name for name in last)


def test_a_checkpoint_without_an_optimizer_is_not_looked_at(saved: Path, releases: Callable[[str], Path]) -> None:
    assert no_optimizer(Subject(releases("qwen2-untied"))) == "no optimizer state is stored"
    assert no_optimizer(Subject(saved / BUCKETS)) is None


@pytest.fixture
def broken(saved: Path, copy_of: Callable[[Path], Path]) -> Callable[[str, Callable[[Tensor], Tensor]], Path]:
    """`broken(kind, change)`: a copy in which the numbers of one kind of state in a bucket are others."""

    def make(kind: str, change: Callable[[Tensor], Tensor]) -> Path:
        root = copy_of(saved / BUCKETS)
        path = root / "iter_0000010"
        stored = next(one for key, one in read_metadata(path).tensors.items() if key.endswith(f"bucket_idx_0.{kind}"))
        chunk = max(stored.chunks, key=lambda one: one.sizes)
        with chunk.blob.path.open("ab") as file:
            begin = file.tell()
            length = file.write(blob_of(change(chunk.blob.tensor(stored.dtype, chunk.sizes))))

        def point(content: Metadata) -> None:
            for at, info in content.storage_data.items():
                if at.fqn == stored.key and tuple(at.offset or ()) == chunk.offsets:
                    info.offset, info.length = begin, length

        models.edit_metadata(path, point)
        return root

    return make


def with_nan(tensor: Tensor) -> Tensor:
    tensor[7] = torch.nan
    return tensor


@pytest.mark.parametrize(
    ("kind", "change", "codes"),
    [
        ("exp_avg", with_nan, ["CK213"]),
        ("exp_avg_sq", torch.neg, ["CK213"]),
        ("param", lambda tensor: tensor * (1 + 2**-6), ["CK214"]),
        ("param", torch.clone, []),
    ],
)
def test_a_bucket_with_other_numbers(
    broken: Callable[[str, Callable[[Tensor], Tensor]], Path],
    kind: str,
    change: Callable[[Tensor], Tensor],
    codes: list[str],
) -> None:
    findings, _ = found(broken(kind, change))
    assert [one.code for one in findings] == codes


def test_a_bucket_without_one_kind(saved: Path, copy_of: Callable[[Path], Path]) -> None:
    root = copy_of(saved / BUCKETS)

    def lose_moment(content: Metadata) -> None:
        for key in [key for key in content.state_dict_metadata if "dp_group_idx_1" in key and key.endswith(".exp_avg")]:
            del content.state_dict_metadata[key]

    models.edit_metadata(root / "iter_0000010", lose_moment)
    (finding,) = optimizer_whole(Subject(root), Tally())
    assert (finding.code, finding.expected) == ("CK121", "exp_avg, as other buckets have")
    assert "dp_group_idx_1" in (finding.tensor or "")


def test_state_whose_parts_were_flattened_is_seen_in_the_shape_of_its_weight() -> None:
    weight = torch.arange(4 * 6).reshape(4, 6)
    # Two parts along each axis, [2, 3] each, row by row.
    parts = [[weight[row : row + 2, column : column + 3].reshape(-1) for column in (0, 3)] for row in (0, 2)]
    state = torch.stack([torch.stack(row) for row in parts])
    assert state[1, 0].tolist() == [12, 13, 14, 18, 19, 20]
    assert is_flattened((4, 6), tuple(state.shape))
    assert torch.equal(unflattened(state, (4, 6)), weight)
    assert not is_flattened((4, 6), (2, 2, 5))
    assert not is_flattened((4, 6), (3, 2, 4))
    assert not is_flattened((4, 6), (4, 6))


@pytest.mark.parametrize(("offset", "elements", "padding"), [(100, 28, True), (128, 28, False), (100, 64, False)])
def test_a_short_chunk_that_begins_where_no_parameter_can_is_padding(offset: int, elements: int, padding: bool) -> None:
    assert is_padding(offset, elements) == padding
