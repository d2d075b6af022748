"""Weight updates of engines that answer as vLLM does; test_weight_sync.py has what engines share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sync_engines import LAYERS, FakeVllm, mixed, served, weights
from torch import Tensor

from ckptkit import CkptkitError
from ckptkit.app.job import vllm
from ckptkit.hooks import SyncResult, WeightSyncCheck

PARAMS = 3 + LAYERS * 3 + 2 + (LAYERS - 1) * 3  # by hand, as in test_weight_sync.py
HEAD = "lm_head.weight"
OLD = "as they were at the last check, not as sent"


@contextmanager
def checked(engine: FakeVllm) -> Iterator[WeightSyncCheck]:
    with served(engine.answer) as url:
        yield WeightSyncCheck(url, program="vllm")


def send(
    check: WeightSyncCheck,
    engine: FakeVllm,
    version: int,
    recorded: Mapping[str, Tensor],
    arrived: Mapping[str, Tensor] | None = None,
) -> SyncResult:
    """One update: what the trainer records, and what arrives where that is something else."""
    for name, tensor in recorded.items():
        check.record(name, tensor)
    engine.load(recorded if arrived is None else arrived, version)
    result = check.after_update(version)
    assert result is not None
    return result


def without(given: Mapping[str, Tensor], *parts: str) -> dict[str, Tensor]:
    return {name: one for name, one in given.items() if not any(part in name for part in parts)}


@pytest.mark.parametrize("checker", [True, False])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_update_that_arrived_is_compared_by_value_on_every_rank(
    tp: int, pp: int, checker: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeVllm(tp, pp, checker=checker)
    with checked(engine) as check:
        for version in (1, 2, 3):
            result = send(check, engine, version, weights(version))
            assert (result.by_value, result.by_change) == (PARAMS * tp, 0)
            assert (result.unseen, result.absent, result.not_sent) == ([], [], [])
    assert capsys.readouterr().err == ""
    assert ("collective_rpc" in engine.asked) is not checker


def test_engine_that_is_no_server_is_asked_by_its_collective_rpc() -> None:
    """Its setup at once: while the first tensor is recorded its workers may wait for the update."""
    engine = FakeVllm(2)
    check = WeightSyncCheck(engine.rpc, program="vllm")
    assert engine.asked == ["ckptkit_setup"]
    assert send(check, engine, 1, weights(1)).by_value == PARAMS * 2
    assert engine.asked == ["ckptkit_setup", "ckptkit_weights"]


@pytest.mark.parametrize(
    ("lost", "param", "part"),
    [
        ("layers.0.mlp.up_proj", "layers.0.mlp.gate_up_proj.weight", "up_proj"),
        ("layers.1.self_attn.k_proj", "layers.1.self_attn.qkv_proj.weight", "k_proj"),
        ("layers.1.self_attn.v_proj", "layers.1.self_attn.qkv_proj.weight", "v_proj"),
        ("layers.2.mlp.experts.3.up_proj", "layers.2.mlp.experts.w13_weight", "up_proj of expert 3"),
    ],
)
def test_part_of_a_fused_parameter_that_is_never_sent_is_named_in_the_first_check(
    lost: str, param: str, part: str
) -> None:
    engine = FakeVllm()
    with checked(engine) as check:
        engine.load(weights(0), 0)
        with pytest.raises(CkptkitError) as raised:
            send(check, engine, 1, without(weights(1), lost))
    (line,) = raised.value.details
    assert line.endswith(f"{param}: {part} of it was not sent")


def test_keys_that_are_the_values_too_are_sent_once() -> None:
    """As full attention of Gemma 4 has them."""
    engine = FakeVllm()
    with checked(engine) as check:
        for version in (1, 2):
            sent = without(weights(version), ".v_proj.")
            same = {name.replace("k_proj", "v_proj"): one for name, one in sent.items() if ".k_proj." in name}
            result = send(check, engine, version, sent, sent | same)
            assert (result.by_value, result.unseen) == (PARAMS, [])


def test_chosen_tensors_alone_are_no_fault() -> None:
    engine = FakeVllm()
    with served(engine.answer) as url:
        check = WeightSyncCheck(url, program="vllm", tensors=r"k_proj|layernorm")
        engine.load(weights(0), 0)
        result = send(check, engine, 1, weights(1))
    assert (result.by_value, result.not_sent) == (LAYERS, [])


def test_tied_head_under_one_name_stays_old_on_the_last_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """vllm#56689: the trainer's named_parameters() has one of both names."""
    engine = FakeVllm(2, 2)

    def tied(version: int) -> dict[str, Tensor]:
        found = weights(version)
        return found | {HEAD: found["model.embed_tokens.weight"]}

    with checked(engine) as check:
        engine.load(tied(1), 0)
        same = send(check, engine, 1, without(tied(1), HEAD))
        assert same.not_sent == [HEAD]
        with pytest.raises(CkptkitError) as raised:
            send(check, engine, 2, without(tied(2), HEAD))
    assert [line.partition(", ")[2] for line in raised.value.details] == [
        f"tensor parallel rank {rank}, pipeline parallel rank 1: lm_head.weight: nothing was sent for it, and it does "
        "not hold the embeddings that were sent: send a tied output layer under both names"
        for rank in (0, 1)
    ]
    assert "held by engines, and nothing was sent for them: lm_head.weight" in capsys.readouterr().err


def test_second_update_that_changes_what_is_equal_is_named() -> None:
    """verl#7904, where an engine keeps experts in a layout that is not known: the same values, then others."""

    class Repacked(FakeVllm):
        def stage(self, stage: int, rank: int) -> dict[str, Tensor]:
            found = super().stage(stage, rank)
            return {name: one.flip(0) if "experts" in name else one for name, one in found.items()}

    engine = Repacked()
    with checked(engine) as check:
        send(check, engine, 1, weights(1))
        same = {"model.layers.1.mlp.experts.0.up_proj.weight": weights(9)["model.norm.weight"].expand(8, 8)}
        with pytest.raises(CkptkitError) as raised:
            send(check, engine, 2, weights(1), weights(1) | same)
    (line,) = raised.value.details
    assert line.endswith("layers.1.mlp.experts.w13_weight: changed, though the same was sent as at the last check")


def test_delta_that_failed_and_was_swallowed_is_named() -> None:
    """slime#2104: the trainer records what the weights are now, and what it sent was not applied."""
    engine = FakeVllm()
    name = "model.layers.2.self_attn.o_proj.weight"
    with checked(engine) as check:
        send(check, engine, 1, weights(1))
        with pytest.raises(CkptkitError) as raised:
            send(check, engine, 2, weights(1) | {name: weights(2)[name]}, {})
    (line,) = raised.value.details
    assert line.endswith(f"layers.2.self_attn.o_proj.weight: {OLD}")


def test_weights_lost_in_sleep_are_named_without_an_update() -> None:
    """trl#5312: level 2 keeps no weights, and nothing is sent before the next generation."""
    engine = FakeVllm(1, 2)
    with checked(engine) as check:
        with pytest.raises(CkptkitError, match="call after_update first"):
            check.after_resume()
        send(check, engine, 1, weights(1))
        assert check.after_resume() == PARAMS
        engine.held["model.layers.2.input_layernorm.weight"] = weights(5)["model.norm.weight"] * 0
        with pytest.raises(CkptkitError, match="engines lost what they held at the last check") as raised:
            check.after_resume()
    (line,) = raised.value.details
    assert line.endswith("pipeline parallel rank 1: layers.2.input_layernorm.weight: not as at the last check")


def test_version_is_compared_where_engine_and_trainer_have_one() -> None:
    engine = FakeVllm()
    with checked(engine) as check:
        engine.load(weights(1), "default")
        for name, tensor in weights(1).items():
            check.record(name, tensor)
        assert check.after_update(1) is not None  # vLLM was never given one
        for name, tensor in weights(1).items():
            check.record(name, tensor)
        engine.load({}, 4)
        assert check.after_update() is not None
        for name, tensor in weights(1).items():
            check.record(name, tensor)
        with pytest.raises(CkptkitError, match="has weight version 4, not 5"):
            check.after_update(5)


def test_block_fp8_as_it_is_stored_is_compared_by_value() -> None:
    """vLLM's checksums are of bytes; SGLang's of a weight with its scales."""
    engine = FakeVllm()
    scale = "model.layers.1.self_attn.o_proj.weight_scale_inv"

    class Scaled(FakeVllm):
        def stage(self, stage: int, rank: int) -> dict[str, Tensor]:
            return super().stage(stage, rank) | {scale: self.held[scale]}

    engine = Scaled()
    with checked(engine) as check:
        result = send(check, engine, 1, weights(1) | {scale: weights(2)["model.norm.weight"].float()})
    assert (result.by_value, result.unseen) == (PARAMS + 1, [])


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (FakeVllm(checker=False, reader=False), "not implemented"),
        (FakeVllm(data_parallel_size=2), "answered for 1 of its 2 ranks"),
    ],
)
def test_engine_that_does_not_answer_for_its_ranks_is_named(engine: FakeVllm, said: str) -> None:
    with checked(engine) as check, pytest.raises(CkptkitError, match=said) as raised:
        send(check, engine, 1, weights(1))
    hint = str(raised.value.hint)
    assert "--worker-extension-cls ckptkit.hooks_vllm.WeightReader" in hint or "its own address" in hint


def test_collective_rpc_without_the_reader_says_how_to_add_it() -> None:
    def refuse(method: str) -> list[Any]:
        raise NotImplementedError(f"Method {method!r} is not implemented.")

    with pytest.raises(CkptkitError, match="engine 1: Method 'ckptkit_setup'") as raised:
        WeightSyncCheck(refuse, program="vllm")
    assert "worker-extension-cls" in str(raised.value.hint)


def test_engines_with_and_without_a_checker_are_checked_apart() -> None:
    engines = FakeVllm(), FakeVllm(checker=False)
    with served(engines[0].answer) as first, served(engines[1].answer) as second:
        check = WeightSyncCheck([first, second], program="vllm")
        with pytest.raises(CkptkitError, match="others by a worker extension"):
            check.record(HEAD, weights(1)[HEAD])


def test_checksum_of_a_device_is_that_of_every_byte_and_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_CHUNK", 16)
    values = torch.randn(7, 37, generator=torch.Generator().manual_seed(0)).bfloat16()
    cases = [values, values[1:], values.T, values[0, :3], values.view(torch.uint8)[0, 3:], values[:0], values.float()]
    found = [vllm.device_digest(one) for one in cases]
    assert found == [mixed(one) for one in cases]
    assert len({*found, vllm.device_digest(values.flip(0)), vllm.device_digest(torch.zeros(8))}) == len(cases) + 2


def test_kernel_sums_as_torch_does() -> None:
    """In Triton's interpreter, which a process chooses when it starts. On a GPU the test before this one runs it."""
    pytest.importorskip("triton")
    code = """
import torch
from ckptkit.app.job import triton_digest, vllm
for count in (1, 8, 4095, 4096, 9000):
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (count,))
    total = torch.full((1,), words.nbytes)
    triton_digest.add_words(total, words, (vllm._PLACE, vllm._FIRST, vllm._SECOND))
    assert vllm.checksums_of([total]) == [vllm.device_digest(words)], count
"""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


def test_engine_of_sglang_is_an_address() -> None:
    with pytest.raises(CkptkitError, match="1 engines of SGLang are no address"):
        WeightSyncCheck(FakeVllm().rpc, digest=lambda tensor: "")
    with pytest.raises(CkptkitError, match="program is 'other'"):
        WeightSyncCheck("http://127.0.0.1:1", program="other")  # type: ignore[arg-type]
