"""Files of recorded rollouts: what they may hold, and what is said of damaged ones."""

import enum
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from support.messages import text_with
from support.rollout_files import Sample, write

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.witnesses.rollouts.recorded import read_recording


def sample(**fields):
    return Sample(**{"tokens": [5, 6, 7], "response_length": 2, "rollout_log_probs": [-1.0, -2.0], **fields})


def test_fields_of_a_sample_are_read(tmp_path):
    given = sample(prompt="a", weight_versions=["1", 2], loss_mask=[1, 0], metadata={"temperature": 0})
    tensors = sample(tokens=torch.tensor([4, 5, 6, 7])[1:], rollout_log_probs=torch.tensor([-1.0, -2.0]))
    found, of_tensors = read_recording(write(tmp_path / "a.pt", [given, tensors])).samples
    assert (of_tensors.tokens, of_tensors.log_probs) == (found.tokens, found.log_probs)
    assert (found.tokens, found.prompt_tokens, found.response) == ([5, 6, 7], [5], 2)
    assert found.log_probs == {"rollout_log_probs": [-1.0, -2.0]}
    assert (found.mask, found.prompt, found.versions) == ([True, False], "a", ("1", "2"))
    # SGLang answers a greedy request with log-probabilities that are not scaled.
    assert found.temperature == 1.0


@pytest.mark.parametrize("protocol", [2, 4])
def test_classes_that_slime_and_miles_save_stay_inert(monkeypatch, tmp_path, protocol):
    class Status(enum.Enum):
        COMPLETED = "completed"

    class AdapterRef:
        def __init__(self):
            self.name = "adapter"

    types = ModuleType("miles.utils.types")
    types.Sample, types.AdapterRef = type("Sample", (), {"Status": Status}), AdapterRef
    for one, name in ((types.Sample, "Sample"), (Status, "Sample.Status"), (AdapterRef, "AdapterRef")):
        one.__module__, one.__qualname__ = "miles.utils.types", name
    for module in (ModuleType("miles"), ModuleType("miles.utils"), types):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    given = sample(
        status=Status.COMPLETED,
        rollout_routed_experts=np.zeros((2, 3, 1), np.int32),
        metadata={"adapter": AdapterRef(), "score": np.float32(1), "seen": {1, 2}, "raw": b"\xff"}
        | {"earlier": Call(getattr, Status, "COMPLETED")},  # as Python 3.11.2 pickles a member
    )
    torch.save({"rollout_id": 1, "samples": [given.to_dict()]}, tmp_path / "a.pt", pickle_protocol=protocol)
    (found,) = read_recording(tmp_path / "a.pt").samples
    assert found.tokens == [5, 6, 7]
    given.metadata = Call(getattr, Status, "mro")
    torch.save({"samples": [given.to_dict()]}, tmp_path / "b.pt", pickle_protocol=protocol)
    with pytest.raises(CkptkitError, match=r"miles\.utils\.types\.Sample\.Status\.mro"):
        read_recording(tmp_path / "b.pt")


class Call:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (Call(os.system, "touch ran"), "posix.system"),
        (Call(getattr, Path, "home"), "pathlib.Path"),
        (Call(getattr, "text", "upper"), "builtins.getattr"),
        (Path("a"), "pathlib.PosixPath"),
    ],
)
def test_other_classes_and_functions_are_refused_and_never_run(monkeypatch, tmp_path, call, kind):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CkptkitError, match=kind):
        read_recording(write(tmp_path / "a.pt", [sample(metadata={"x": call})]))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_log_probs": [-1.0]}, "0 2 1 rollout_log_probs"),
        ({"loss_mask": [1, 1, 1]}, "0 2 3 loss_mask"),
        ({"response_length": 4}, "0 3 response_length 4"),
        ({"response_length": "2"}, "0 3 response_length 2"),
        ({"tokens": [5, 6, 7.5]}, "0 7.5"),
        ({"tokens": [5, 6, True]}, "sample 0 True"),
        ({"rollout_log_probs": [None, -1.0]}, "0 rollout_log_probs None"),
        ({"tokens": torch.zeros(1, 3, dtype=torch.long)}, "numbers"),
    ],
)
def test_samples_whose_lists_do_not_match_are_errors(tmp_path, fields, message):
    with pytest.raises(CkptkitError) as error:
        read_recording(write(tmp_path / "a.pt", [sample(**fields)]))
    assert error.value.message == text_with(message)


@pytest.mark.parametrize("content", [{"rollout_id": 1, "samples": []}, {"rollout_id": 1}, {"samples": ["text"]}, [1]])
def test_files_without_samples_are_errors(tmp_path, content):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(CkptkitError, match="samples"):
        read_recording(tmp_path / "a.pt")


def test_files_that_torch_did_not_write_are_errors(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"text")
    for name in ("a.pt", "b.pt"):
        with pytest.raises(CkptkitError, match=name):
            read_recording(tmp_path / name)


def test_prompts_that_are_no_plain_data_are_left_out(tmp_path):
    odd = [{"role": "user", "content": torch.zeros(1)}]
    every = [sample(prompt=odd), sample(prompt=[{"role": "user", "content": "a"}]), sample(prompt="")]
    found = read_recording(write(tmp_path / "a.pt", every)).samples
    assert [one.prompt for one in found] == [None, [{"role": "user", "content": "a"}], None]
