"""Files of recorded rollouts: what they may hold, and what is said of damaged ones."""

from __future__ import annotations

import enum
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support.messages import text_with
from support.rollout_files import Sample, write

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.witnesses.rollouts.recorded import read_recording


def sample(**fields: Any) -> Sample:
    return Sample(**{"tokens": [5, 6, 7], "response_length": 2, "rollout_log_probs": [-1.0, -2.0], **fields})


def test_fields_of_a_sample_are_read(tmp_path: Path) -> None:
    given = sample(prompt="a", weight_versions=["1", 2], loss_mask=[1, 0], metadata={"temperature": 0})
    (found,) = read_recording(write(tmp_path / "a.pt", [given])).samples
    assert (found.tokens, found.prompt_tokens, found.response) == ([5, 6, 7], [5], 2)
    assert found.log_probs == {"rollout_log_probs": [-1.0, -2.0]}
    assert (found.mask, found.prompt, found.versions) == ([True, False], "a", ("1", "2"))
    # SGLang answers a greedy request with log-probabilities that are not scaled.
    assert found.temperature == 1.0


def test_tensors_are_read_as_lists_are(tmp_path: Path) -> None:
    given = sample(tokens=torch.tensor([4, 5, 6, 7])[1:], rollout_log_probs=torch.tensor([-1.0, -2.0]))
    (found,) = read_recording(write(tmp_path / "a.pt", [given])).samples
    assert (found.tokens, found.log_probs["rollout_log_probs"]) == ([5, 6, 7], [-1.0, -2.0])


@pytest.mark.parametrize("protocol", [2, 4])
def test_classes_that_slime_and_miles_save_stay_inert(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, protocol: int
) -> None:
    class Status(enum.Enum):
        COMPLETED = "completed"

    class AdapterRef:
        def __init__(self) -> None:
            self.name = "adapter"

    class Types(ModuleType):
        class Sample:
            pass

    types = Types("miles.utils.types")
    for one, name in ((Types.Sample, "Sample"), (Status, "Sample.Status"), (AdapterRef, "AdapterRef")):
        one.__module__, one.__qualname__ = "miles.utils.types", name
    Types.Sample.Status = Status
    types.AdapterRef = AdapterRef
    for name in ("miles", "miles.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "miles.utils.types", types)
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
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (Call(os.system, "touch ran"), "posix.system"),
        (Call(getattr, Path, "home"), "pathlib.Path"),
        (Call(getattr, "text", "upper"), "builtins.getattr"),
        (Call(eval, "1"), "builtins.eval"),
        (Path("a"), "pathlib.PosixPath"),
    ],
)
def test_other_classes_and_functions_are_refused_and_never_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: Any, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CkptkitError, match=kind) as error:
        read_recording(write(tmp_path / "a.pt", [sample(metadata={"x": call})]))
    assert "nothing" in str(error.value.hint)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_log_probs": [-1.0]}, "0 1 rollout_log_probs 2"),
        ({"loss_mask": [1, 1, 1]}, "0 3 loss_mask 2"),
        ({"response_length": 4}, "0 3 response 4"),
        ({"response_length": "2"}, "0 3 response 2"),
        ({"tokens": [5, 6, 7.5]}, "0 7.5"),
        ({"tokens": [5, 6, True]}, "sample 0 True"),
        ({"tokens": None}, "sample 0 None"),
        ({"rollout_log_probs": [None, -1.0]}, "0 rollout_log_probs None"),
        ({"tokens": torch.zeros(1, 3, dtype=torch.long)}, "numbers"),
    ],
)
def test_samples_whose_lists_do_not_match_are_errors(tmp_path: Path, fields: Any, message: str) -> None:
    with pytest.raises(CkptkitError) as error:
        read_recording(write(tmp_path / "a.pt", [sample(**fields)]))
    assert error.value.message == text_with(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"rollout_id": 1, "samples": []}, "has no samples"),
        ({"rollout_id": 1}, "samples"),
        ({"samples": ["text"]}, "samples"),
        ([1, 2], "samples"),
    ],
)
def test_files_without_samples_are_errors(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(CkptkitError, match=message):
        read_recording(tmp_path / "a.pt")


def test_files_that_torch_did_not_write_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"text")
    with pytest.raises(CkptkitError, match="not a zip file"):
        read_recording(tmp_path / "a.pt")
    with pytest.raises(CkptkitError, match="No such file"):
        read_recording(tmp_path / "b.pt")


def test_prompts_that_are_no_plain_data_are_left_out(tmp_path: Path) -> None:
    odd = [{"role": "user", "content": torch.zeros(1)}]
    every = [sample(prompt=odd), sample(prompt=[{"role": "user", "content": "a"}]), sample(prompt="")]
    found = read_recording(write(tmp_path / "a.pt", every)).samples
    assert [one.prompt for one in found] == [None, [{"role": "user", "content": "a"}], None]
