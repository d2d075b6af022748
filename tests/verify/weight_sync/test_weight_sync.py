"""Weight updates of engines that answer as SGLang or vLLM does: what arrived passes, what did not is named."""

import os
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from support.messages import text_with
from support.online_runs import marlin_experts
from support.sync_engines import EXPERTS, LAYERS, FakeEngine, FakeVllm, digest, mixed, served, weights

from ckptkit import CkptkitError
from ckptkit.hooks import WeightSyncCheck
from ckptkit.verify.weight_sync import messages, vllm

# By hand: embedding, output layer and last norm; five for each layer's attention and norms; two of a dense MLP, or a
# router and two of experts.
PARAMS = 3 + LAYERS * 3 + 2 + (LAYERS - 1) * 3


@contextmanager
def checked(*engines, **options):
    how = {"program": "vllm"} if isinstance(engines[0], FakeVllm) else {"digest": digest}
    with ExitStack() as stack:
        urls = [stack.enter_context(served(engine.answer)) for engine in engines]
        yield WeightSyncCheck(urls, **how, **options)


def send(check, engines, version, recorded, arrived=None):
    for name, tensor in recorded.items():
        check.record(name, tensor)
    for engine in engines:
        engine.load(recorded if arrived is None else arrived, version)
    return check.after_update(version)


def exchanged(given, one, other):
    return {**given, one: given[other], other: given[one]}


ENGINES = [
    *(partial(FakeEngine, *sizes) for sizes in ((1, 1), (2, 2), (4, 1))),
    *(partial(FakeVllm, *sizes, checker=one) for sizes, one in (((1, 1), False), ((2, 1), True), ((4, 2), False))),
]


@pytest.mark.parametrize("make", ENGINES)
def test_update_that_arrived_is_compared_by_value_on_every_rank(make, capsys):
    engine = make()
    with checked(engine) as check:
        for version in (1, 2, 3):
            result = send(check, [engine], version, weights(version))
            assert (result.by_value, result.by_change) == (PARAMS * engine.tp, 0)
            assert (result.unseen, result.absent, result.not_sent) == ([], [], [])
            assert 0 < result.seconds <= check.seconds
    assert capsys.readouterr().err == ""
    assert ("collective_rpc" in engine.asked) == (isinstance(engine, FakeVllm) and not engine.checker)


def test_parameter_that_holds_another_layer_says_which():
    engine = FakeEngine()
    with checked(engine) as check:
        sent = weights(1)
        names = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1)]
        with pytest.raises(CkptkitError) as raised:
            send(check, [engine], 1, sent, exchanged(sent, *names))
    first, second = raised.value.details
    assert first == text_with("layers.0.self_attn.o_proj.weight layers.1.self_attn.o_proj.weight")
    assert second == text_with("layers.1.self_attn.o_proj.weight layers.0.self_attn.o_proj.weight")


def test_engine_that_missed_the_update_is_named():
    engines = [FakeEngine(), FakeEngine(), FakeEngine()]
    with checked(*engines) as check:
        send(check, engines, 1, weights(1))
        for name, tensor in weights(2).items():
            check.record(name, tensor)
        for engine in (engines[0], engines[2]):
            engine.load(weights(2), 2)
        with pytest.raises(CkptkitError) as raised:
            check.after_update(2)
        url = check._engines[1].name
    assert raised.value.details[0] == f"{url} has weight version 1, not 2"
    assert all(line.startswith(url) for line in raised.value.details)


def test_two_updates_that_lack_different_tensors_of_experts_name_the_second():
    """Of chosen tensors the first check cannot know all parts; the second one has as many, with another gap."""
    engine, names = FakeEngine(), [f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in (2, 1)]
    with checked(engine, tensors="proj") as check:
        result = send(check, [engine], 1, without(weights(1), names[0]), weights(1))
        assert result.unseen == ["layers.1.mlp.experts.w13_weight"]
        with pytest.raises(CkptkitError) as raised:
            send(check, [engine], 2, without(weights(2), names[1]), weights(2))
    assert raised.value.details == (text_with("earlier layers.1.mlp.experts.1.up_proj.weight"),)


class Repacked(FakeEngine):
    """Keeps experts in a layout that nobody knows, as kernels for INT4 do."""

    def checksums(self, rank):
        found = self.rank(rank)
        return {name: digest(tensor.flip(0) if "experts" in name else tensor) for name, tensor in found.items()}


def test_unknown_layout_is_compared_by_change_and_said_once(capsys):
    engine, many = Repacked(), (LAYERS - 1) * 2
    with checked(engine) as check:
        results = [send(check, [engine], version, weights(version)) for version in (1, 2)]
        assert [(one.by_value, one.by_change) for one in results if one] == [(PARAMS - many, 0), (PARAMS - many, many)]
        sent = weights(3)
        arrived = {name: tensor for name, tensor in sent.items() if ".layers.2.mlp.experts." not in name}
        with pytest.raises(CkptkitError) as raised:
            send(check, [engine], 3, sent, arrived)
        (line,) = raised.value.details
        assert "layers.2.mlp.experts.{w13,w2}" not in line
        assert line == text_with("not change")
        send(check, [engine], 4, sent)
        same = {**sent, "model.layers.1.mlp.experts.0.up_proj.weight": weights(9)["model.norm.weight"].expand(8, 8)}
        with pytest.raises(CkptkitError, match="although the same"):
            send(check, [engine], 5, sent, same)
    said = capsys.readouterr().err.splitlines()
    assert said == [text_with("1 layers.{1..2}.mlp.experts.w13_weight layers.{1..2}.mlp.experts.w2_weight")]


class ForMarlin(FakeEngine):
    """Keeps two experts in INT4 for Marlin's kernels (SGLang `marlin_permute_scales`, `gptq_marlin_moe_repack`)."""

    def rank(self, rank):
        found = {"model.norm.weight": self.held["model.norm.weight"]}
        found |= {f"{EXPERT}.{name}": torch.empty(2, 0) for name in ("w13_weight_shape", "w13_g_idx_sort_indices")}
        for leaf in ("packed", "scale"):
            for name, parts in (("w13", ("gate", "up")), ("w2", ("down",))):
                names = [[f"{EXPERT}.{number}.{part}_proj.weight_{leaf}" for part in parts] for number in (0, 1)]
                loaded = torch.stack([torch.cat([self.held[one] for one in expert]) for expert in names])
                turned = loaded.transpose(1, 2).contiguous()
                order = [8 * column + row for row in range(8) for column in range(8)]
                scales = turned.reshape(-1, 64)[:, order].reshape(turned.shape)
                found[f"{EXPERT}.{name}_weight_{leaf}"] = scales if leaf == "scale" else marlin_experts(turned)
        return found


EXPERT = "model.layers.0.mlp.experts"


def int4(seed):
    random = torch.Generator().manual_seed(seed)
    found = {"model.norm.weight": torch.randn(64, generator=random)}
    for module in (f"{EXPERT}.{number}.{part}_proj" for number in (0, 1) for part in ("gate", "up", "down")):
        found[f"{module}.weight_packed"] = torch.randint(-(1 << 31), 1 << 31, (64, 8), generator=random).int()
        found[f"{module}.weight_scale"] = torch.randn(64, 2, generator=random).bfloat16()
    return found


def test_experts_repacked_for_marlin_are_compared_by_value():
    engine = ForMarlin()
    with checked(engine) as check:
        result = send(check, [engine], 1, int4(1))
        assert (result.by_value, result.unseen, result.not_sent) == (5, [], [])
        first, second = (f"{EXPERT}.{number}.down_proj.weight_packed" for number in (0, 1))
        with pytest.raises(CkptkitError) as raised:
            send(check, [engine], 2, int4(2), exchanged(int4(2), first, second))
    assert raised.value.details == (text_with("layers.0.mlp.experts.w2_weight_packed"),)


def test_router_that_is_sent_packed_and_kept_unpacked_is_named():
    """slime packs what `ignore` lacks; SGLang's router is never quantized, and drops names that it does not know."""
    engine, router = FakeEngine(), "model.layers.1.mlp.gate.weight"
    engine.load(weights(0), 0)
    sent = {name.replace(router, f"{router}_packed"): tensor for name, tensor in weights(1).items()}
    with checked(engine) as check, pytest.raises(CkptkitError) as raised:
        send(check, [engine], 1, sent)
    assert raised.value.details == (text_with("layers.1.mlp.gate.weight ignore"),)


class SharedAmongRouted(FakeEngine):
    """Keeps the shared expert behind the others, as SGLang does for DeepSeek V3 and GLM-4.5."""

    def rank(self, rank):
        found = super().rank(rank)
        for layer in range(1, LAYERS):
            block = f"model.layers.{layer}.mlp"
            gate, up, down = (
                self.held[f"{block}.shared_experts.{part}_proj.weight"] for part in ("gate", "up", "down")
            )
            half = slice(rank * 8 // self.tp, (rank + 1) * 8 // self.tp)
            first, second = torch.cat([gate[half], up[half]])[None], down[:, half][None]
            for name, last in (("w13", first), ("w2", second)):
                name = f"{block}.experts.{name}_weight"
                found[name] = torch.cat([found[name], last])
        return found


def with_shared(seed):
    other = weights(seed + 100)
    names = [name for name in other if ".experts.0." in name]
    return weights(seed) | {name.replace("experts.0", "shared_experts"): other[name] for name in names}


@pytest.mark.parametrize("tp", [1, 2])
def test_shared_expert_among_routed_ones_is_compared_by_value(tp, capsys):
    engine = SharedAmongRouted(tp)
    with checked(engine) as check:
        for version in (1, 2):
            result = send(check, [engine], version, with_shared(version))
            assert (result.by_value, result.unseen, result.absent) == (PARAMS * tp, [], [])
        sent = with_shared(3)
        lost = "model.layers.2.mlp.shared_experts.up_proj.weight"
        with pytest.raises(CkptkitError, match=r"layers\.2\.mlp\.experts\.w13_weight: the values"):
            send(check, [engine], 3, sent, {name: tensor for name, tensor in sent.items() if name != lost})
    assert capsys.readouterr().err == ""


def test_engines_that_differ_in_an_unknown_layout_are_found():
    engines = [Repacked(), Repacked(), Repacked()]
    with checked(*engines) as check:
        sent = weights(1)
        for name, tensor in sent.items():
            check.record(name, tensor)
        for engine in engines:
            engine.load(sent, 1)
        names = [f"model.layers.2.mlp.experts.{expert}.up_proj.weight" for expert in (0, 1)]
        engines[2].load(exchanged(sent, *names), 1)
        with pytest.raises(CkptkitError) as raised:
            check.after_update(1)
        url = check._engines[2].name
    assert raised.value.details == (text_with(f"{url} layers.2.mlp.experts.w13_weight"),)


def test_no_room_for_experts_is_made_good_by_the_next_checks(capsys):
    """At first nobody knows how many experts there are, so all are kept until the end; later none waits long."""
    engine = FakeEngine()
    layer = EXPERTS * 3 * 8 * 8 * 2  # bytes of a layer's experts
    with checked(engine, room=layer) as check:
        first, second = (send(check, [engine], version, weights(version)) for version in (1, 2))
    assert 0 < len(first.unseen) < (LAYERS - 1) * 2
    assert (second.unseen, second.by_value) == ([], PARAMS)
    assert "compared" in capsys.readouterr().err


@pytest.mark.sglang
def test_engine_of_another_release_is_said_and_not_judged_by_its_checksums():
    """Its function may be another one, so nothing that was sent can be found."""

    class Other(FakeEngine):
        def checksums(self, rank):
            return {name: checksum[::-1] for name, checksum in super().checksums(rank).items()}

    engine = Other(version="0.0.1")
    with checked(engine) as check:
        check._own_digest = True
        result = send(check, [engine], 1, weights(1))
    assert (result.by_value, len(result.unseen)) == (0, PARAMS)


def test_what_an_engine_does_with_a_tensor_is_no_false_alarm(capsys):
    """It has no parameter for one; a change in float32 is lost in its bfloat16; keys are the values too (Gemma 4)."""

    class Rounding(FakeEngine):
        def checksums(self, rank):
            return {name: digest(tensor.bfloat16()) for name, tensor in self.rank(rank).items()}

    engine, name = Rounding(), "model.layers.1.mlp.gate.weight"
    with checked(engine) as check:
        sent = weights(1) | {name: weights(1)[name].float(), "model.layers.3.eh_proj.weight": torch.ones(8).bfloat16()}
        assert send(check, [engine], 1, sent).absent == ["layers.3.eh_proj.weight"]
        result = send(check, [engine], 2, sent | {name: sent[name] * (1 + 2**-20)})
        assert (result.unseen, result.by_change) == (["layers.1.mlp.gate.weight"], 0)
    assert "layers.3.eh_proj.weight" in capsys.readouterr().err
    other = FakeVllm()
    with checked(other) as check:
        for version in (1, 2):
            sent = without(weights(version), ".v_proj.")
            same = {name.replace("k_proj", "v_proj"): one for name, one in sent.items() if ".k_proj." in name}
            result = send(check, [other], version, sent, sent | same)
            assert (result.by_value, result.unseen) == (PARAMS, [])
    with served(other.answer) as url:
        result = send(WeightSyncCheck(url, program="vllm", tensors=r"k_proj|layernorm"), [other], 3, weights(3))
    assert (result.by_value, result.not_sent) == (LAYERS, [])


def test_version_is_compared_where_engine_and_trainer_have_one():
    engine = FakeVllm()
    with checked(engine) as check:
        with pytest.raises(CkptkitError, match="recorded"):
            check.after_update(1)
        for number, (version, held) in enumerate(((1, "default"), (None, 4), (5, 4))):  # vLLM may have been given none
            for name, tensor in weights(1).items():
                check.record(name, tensor)
            engine.load(weights(1), held)
            if number < 2:
                assert check.after_update(version) is not None
            else:
                with pytest.raises(CkptkitError, match="has weight version 4, not 5"):
                    check.after_update(version)


def test_buffer_that_is_used_again_after_it_was_recorded_does_no_harm():
    engine = FakeEngine()
    with checked(engine) as check:
        for name, tensor in weights(1).items():
            buffer = tensor.clone()
            check.record(name, buffer)
            buffer.fill_(7)
        engine.load(weights(1), 1)
        result = check.after_update(1)
    assert result.by_value == PARAMS


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (400, {"success": False, "message": "Unsupported action='checksum'"}, "HTTP 400: .*Unsupported action"),
        (200, {"success": True, "message": "Success."}, "no checksums"),
        (200, [], "answered no JSON object"),
    ],
)
def test_engine_that_does_not_answer_is_named(status, answer, said):
    engine = FakeEngine()

    def refuse(path, body):
        return (status, answer) if path == "weights_checker" else engine.answer(path, body)

    with served(refuse) as url:
        check = WeightSyncCheck(url, digest=digest)
        with pytest.raises(CkptkitError, match=rf"{url}/weights_checker.*{said}"):
            send(check, [engine], 1, weights(1))


def test_key_goes_with_every_request():
    engine, keys = FakeEngine(), []

    def guarded(path, body):
        keys.append(body["headers"]["Authorization"])
        return engine.answer(path, body)

    with served(guarded) as url:
        send(WeightSyncCheck(url, digest=digest, headers={"Authorization": "Bearer k"}), [engine], 1, weights(1))
    assert keys == ["Bearer k"] * 3


def test_server_that_quantizes_some_layers_raises_no_false_alarm():
    """There the layers of a kind may be kept in two ways, so each is known by itself."""

    class Quantizing(FakeEngine):
        def checksums(self, rank):
            found = self.rank(rank)
            return {name: digest(tensor.float() if "layers.1" in name else tensor) for name, tensor in found.items()}

    engine = Quantizing(quantization="fp8")
    with checked(engine) as check:
        results = [send(check, [engine], version, weights(version)) for version in (1, 2)]
        assert all(one and {name.split(".")[1] for name in one.unseen} == {"1"} for one in results)
        with pytest.raises(CkptkitError, match="last check"):
            send(check, [engine], 3, weights(3), {})


def test_engine_that_is_slow_to_answer_is_named_while_it_is_waited_for(monkeypatch):
    """So that a check that waits can be told from one that hangs somewhere else."""
    engine, lines, told = FakeEngine(), list[str](), threading.Event()

    def answer(path, body):
        if path == "weights_checker":
            assert told.wait(30)
        return engine.answer(path, body)

    def note(line, **_):
        lines.append(line)
        if "weights_checker" in line:
            told.set()

    monkeypatch.setattr(messages, "_EVERY_S", 0.05)
    monkeypatch.setattr(messages, "print", note, raising=False)
    with served(answer) as url:
        send(WeightSyncCheck(url, digest=digest), [engine], 1, weights(1))
    assert text_with(f"0 {url}/weights_checker") in lines


HEAD = "lm_head.weight"


def without(given, *parts):
    return {name: one for name, one in given.items() if not any(part in name for part in parts)}


def test_engine_that_is_no_server_is_asked_by_its_collective_rpc():
    """Its setup at once: while the first tensor is recorded its workers may wait for the update."""
    engine = FakeVllm(2)
    check = WeightSyncCheck(engine.rpc, program="vllm")
    assert engine.asked == ["ckptkit_setup"]
    assert send(check, [engine], 1, weights(1)).by_value == PARAMS * 2
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
def test_part_of_a_fused_parameter_that_is_never_sent_is_named_in_the_first_check(lost, param, part):
    engine = FakeVllm()
    with checked(engine) as check:
        engine.load(weights(0), 0)
        with pytest.raises(CkptkitError) as raised:
            send(check, [engine], 1, without(weights(1), lost))
    (line,) = raised.value.details
    assert line == text_with(f"{param} {part}")


def test_tied_head_under_one_name_stays_old_on_the_last_stage(capsys):
    """vllm#56689: the trainer's named_parameters() has one of both names."""
    engine = FakeVllm(2, 2)

    def tied(version):
        found = weights(version)
        return found | {HEAD: found["model.embed_tokens.weight"]}

    with checked(engine) as check:
        engine.load(tied(1), 0)
        same = send(check, [engine], 1, without(tied(1), HEAD))
        assert same.not_sent == [HEAD]
        with pytest.raises(CkptkitError) as raised:
            send(check, [engine], 2, without(tied(2), HEAD))
    assert [line.partition(", ")[2] for line in raised.value.details] == [
        text_with(f"{rank} 1 lm_head.weight") for rank in (0, 1)
    ]
    assert "lm_head.weight" in capsys.readouterr().err


def test_weights_lost_in_sleep_are_named_without_an_update():
    """trl#5312: level 2 keeps no weights, and nothing is sent before the next generation."""
    engine = FakeVllm(1, 2)
    with checked(engine) as check:
        with pytest.raises(CkptkitError, match="call after_update first"):
            check.after_resume()
        send(check, [engine], 1, weights(1))
        assert check.after_resume() == PARAMS
        engine.held["model.layers.2.input_layernorm.weight"] = weights(5)["model.norm.weight"] * 0
        with pytest.raises(CkptkitError, match="lost") as raised:
            check.after_resume()
    (line,) = raised.value.details
    assert line == text_with("1 layers.2.input_layernorm.weight")


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (FakeVllm(checker=False, reader=False), "not implemented"),
        (FakeVllm(data_parallel_size=2), "answered for 1 of its 2 ranks"),
    ],
)
def test_engine_that_does_not_answer_for_its_ranks_is_named(engine, said):
    with checked(engine) as check, pytest.raises(CkptkitError, match=said) as raised:
        send(check, [engine], 1, weights(1))
    hint = str(raised.value.hint)
    assert "--worker-extension-cls ckptkit.hooks_vllm.WeightReader" in hint or "each data parallel" in hint


def test_checksum_of_a_device_is_that_of_every_byte_and_its_place(monkeypatch):
    monkeypatch.setattr(vllm, "_CHUNK", 16)
    values = torch.randn(7, 37, generator=torch.Generator().manual_seed(0)).bfloat16()
    cases = [values, values[1:], values.T, values[0, :3], values.view(torch.uint8)[0, 3:], values[:0], values.float()]
    found = [vllm.device_digest(one) for one in cases]
    assert found == [mixed(one) for one in cases]
    assert len({*found, vllm.device_digest(values.flip(0)), vllm.device_digest(torch.zeros(8))}) == len(cases) + 2


def test_kernel_sums_as_torch_does():
    """In Triton's interpreter, which a process chooses when it starts. On a GPU the test before this one runs it."""
    pytest.importorskip("triton")
    code = """
import torch
from ckptkit.verify.weight_sync import triton_digest, vllm
for count in (1, 8, 4095, 4096, 9000):
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (count,))
    total = torch.full((1,), words.nbytes)
    triton_digest.add_words(total, words, (vllm._PLACE, vllm._FIRST, vllm._SECOND))
    assert vllm.checksums_of([total]) == [vllm.device_digest(words)], count
"""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("engines", "options", "said"),
    [
        ("http://127.0.0.1:1", {"every": 0}, "every is 0"),
        ([], {}, "no engine"),
        (FakeVllm().rpc, {}, "1 of the SGLang"),
        ("http://127.0.0.1:1", {"program": "other"}, "program is 'other'"),
    ],
)
def test_checks_that_cannot_be_made_are_refused(engines, options, said):
    with pytest.raises(CkptkitError, match=said):
        WeightSyncCheck(engines, digest=digest, **options)
