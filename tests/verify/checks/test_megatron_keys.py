"""CK114 to CK117, CK111 and CK107: a torch_dist checkpoint wrong in one way; what real Megatron writes is silent."""

from argparse import Namespace

import pytest
import torch
from mutations.edits import edit_common
from mutations.edits import saved as blob_of
from support import models
from support.megatron_saves import SAVES
from support.messages import text_with
from support.nightly import daily

from ckptkit.formats.torch_dist.reader import read_metadata
from ckptkit.formats.torch_dist.training_state import is_flattened, is_padding, unflatten
from ckptkit.verify.checks.values.optimizer import masters_round, optimizer_sound, optimizer_whole
from ckptkit.verify.core.check import CheckResult
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.run import verify

CODES = ["CK114", "CK115", "CK116", "CK117"]
LABELS = [label for label, (_, how) in SAVES.items() if "legacy" not in how and "fsdp2" not in how]


def edit_args(path, **changes):
    edit_common(path, lambda common: vars(common["args"]).update(changes))


@pytest.mark.parametrize("label", daily(LABELS, LABELS[1::2]))
def test_what_megatron_writes_is_silent(label, saved, passes):
    for code in CODES:
        passes(code, saved / label)


def test_training_arguments_without_sizes_require_no_keys(fresh_megatron, alone):
    path = fresh_megatron("qwen2-tied")
    edit_common(path, lambda common: common.update(args=Namespace(seed=1)))
    assert alone("CK114", path)[1] == []
    edit_common(path, lambda common: common.pop("args"))
    report = verify(path)
    assert report.findings == []
    assert [check.code for check in report.checks if check.status == "skipped"] == ["CK114", "CK701"]


def test_per_layer_keys_that_the_arguments_ask_for(fresh_megatron, alone):
    """A list as moe_layer_freq makes Megatron give each layer its keys, whatever non_homogeneous_layers says."""
    path = fresh_megatron("glm4_moe")
    edit_common(path, lambda common: common["content_metadata"].update(non_homogeneous_layers=False))
    assert alone("CK115", path)[1] == []


def test_versions_that_megatron_does_not_know(fresh_megatron, edit_json, alone):
    path = fresh_megatron("qwen2-tied")
    file = path / "release" / "metadata.json"
    sound = file.read_text()
    unknown = {"sharded_backend_version": 2, "common_backend": "x", "common_backend_version": 3}
    for key, value in unknown.items():
        edit_json(file, **{key: value})
        _, (finding,) = alone("CK111", path)
        assert finding.expected.split()[0] == key
        assert finding.actual == f"{key} = {value!r}"
        file.write_text(sound)
    edit_json(file, common_backend=None, common_backend_version=None)  # which later Megatron omits
    assert alone("CK111", path)[1] == []


def test_a_run_in_another_dtype_than_its_weights(fresh_megatron, alone):
    path = fresh_megatron("qwen2-tied")
    edit_args(path, params_dtype=torch.bfloat16)
    assert alone("CK107", path)[1] == []
    edit_args(path, params_dtype=torch.float16)
    _, (finding,) = alone("CK107", path)
    assert (finding.expected, finding.actual) == (text_with("params_dtype bfloat16"), "params_dtype float16")
    assert (finding.severity, finding.file) == ("warning", str(path / "release" / "common.pt"))


# CK121, CK213 and CK214: optimizer state as megatron-core's own distributed optimizer saves it, sound and not.


BUCKETS, NAMED, SEVERAL = (
    "dense, optimizer by bucket",
    "experts, optimizer by parameter",
    "dense, optimizer of several buckets",
)
CHECKS = (optimizer_whole, optimizer_sound, masters_round)


def found(root):
    subject, results = Subject(root), [CheckResult("", "") for _ in CHECKS]
    findings = [one for check, result in zip(CHECKS, results, strict=True) for one in check(subject, result)]
    return findings, [result.tensors_compared for result in results]


@pytest.mark.parametrize(
    ("label", "looked_at"),
    [
        # Two tensor parallel ranks have a bucket each, of three kinds; masters are compared as a whole.
        (BUCKETS, [2, 2 * 3, 1]),
        # 141 keys, of which 10 layers have two for their 12 experts.
        (NAMED, [141, 3 * (121 + 240), 121 + 240]),
    ],
)
def test_what_megatron_saves_is_sound(saved, label, looked_at):
    assert found(saved / label) == ([], looked_at)


def test_parameters_that_megatron_takes_from_the_wrong_place_are_found(saved):
    """Releases up to megatron-core 0.19.2 count a bucket's padding, which the gathered state does not have."""
    findings, _ = found(saved / SEVERAL)
    assert {(one.code, one.severity) for one in findings} == {("CK214", "error")}
    last = {one.tensor or "" for one in findings}
    assert any(name.startswith("optimizer.state.param.decoder.layers.") for name in last)
    # The first bucket lies where it should.
    assert not any("output_layer" in name for name in last)


@pytest.fixture
def broken(saved, copy_of):
    """`broken(kind, change)`: a copy in which the numbers of one kind of state in a bucket are others."""

    def make(kind, change):
        root = copy_of(saved / BUCKETS)
        path = root / "iter_0000010"
        stored = next(one for key, one in read_metadata(path).tensors.items() if key.endswith(f"bucket_idx_0.{kind}"))
        chunk = max(stored.chunks, key=lambda one: one.sizes)
        with chunk.blob.path.open("ab") as file:
            begin = file.tell()
            length = file.write(blob_of(change(chunk.blob.tensor(stored.dtype, chunk.sizes))))

        def point(content):
            for at, info in content.storage_data.items():
                if at.fqn == stored.key and tuple(at.offset or ()) == chunk.offsets:
                    info.offset, info.length = begin, length

        models.edit_metadata(path, point)
        return root

    return make


@pytest.mark.parametrize(
    ("kind", "change", "codes"),
    [
        ("exp_avg", lambda tensor: tensor.index_fill(0, torch.tensor([7]), torch.nan), ["CK213"]),
        ("param", lambda tensor: tensor * (1 + 2**-6), ["CK214"]),
        ("param", torch.clone, []),
    ],
)
def test_a_bucket_with_other_numbers(broken, kind, change, codes):
    findings, _ = found(broken(kind, change))
    assert [one.code for one in findings] == codes


def test_a_bucket_without_one_kind(saved, copy_of):
    root = copy_of(saved / BUCKETS)

    def lose_moment(content):
        for key in [key for key in content.state_dict_metadata if "dp_group_idx_1" in key and key.endswith(".exp_avg")]:
            del content.state_dict_metadata[key]

    models.edit_metadata(root / "iter_0000010", lose_moment)
    (finding,) = optimizer_whole(Subject(root), CheckResult("", ""))
    assert (finding.code, finding.expected) == ("CK121", text_with("exp_avg"))
    assert "dp_group_idx_1" in (finding.tensor or "")


def test_state_whose_parts_were_flattened_is_seen_in_the_shape_of_its_weight():
    weight = torch.arange(4 * 6).reshape(4, 6)
    # Two parts along each axis, [2, 3] each, row by row.
    parts = [[weight[row : row + 2, column : column + 3].reshape(-1) for column in (0, 3)] for row in (0, 2)]
    state = torch.stack([torch.stack(row) for row in parts])
    assert state[1, 0].tolist() == [12, 13, 14, 18, 19, 20]
    assert is_flattened((4, 6), tuple(state.shape))
    assert torch.equal(unflatten(state, (4, 6)), weight)
    assert not is_flattened((4, 6), (2, 2, 5))
    assert not is_flattened((4, 6), (3, 2, 4))
    assert not is_flattened((4, 6), (4, 6))


def test_a_short_chunk_that_begins_where_no_parameter_can_is_padding():
    assert is_padding(offset=100, elements=28)
    assert not is_padding(offset=128, elements=28)
    assert not is_padding(offset=100, elements=64)
