"""The class of a trainer that sends weights, watched: of the shape that those of slime and miles have."""

import asyncio
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.sync_engines import FakeEngine, FakeVllm, digest, served, weights

from ckptkit import CkptkitError
from ckptkit.hooks import watch_rollout, watch_updates

# Sends, as slime 624b824 and miles 31f1ca9 name it: `update_weight_from_tensor.py`, and of distributed updates
# `update_weight_from_distributed.py` (slime) and `update_weight_from_distributed/broadcast.py` (miles).
SENDS = (
    "_send_hf_params",
    "_update_bucket_weights_from_distributed",
    "_send_base_params",
    "_update_weight_implementation",
)


def updater_class(send):
    """A new class, since watching changes it. Its buckets are lists, which are cleared once they were sent."""

    class Updater:
        def __init__(self, engines, urls):
            self.engines, self.urls, self.weight_version, self.lose = engines, urls, 0, ""

        def update_weights(self):
            self.weight_version += 1
            pairs = list(weights(self.weight_version).items())
            for first in range(0, len(pairs), 10):
                getattr(self, send)(pairs[first : first + 10], pbar=None)

        def sent(self, named_tensors, pbar=None):
            arrived = {name: tensor for name, tensor in named_tensors if not self.lose or self.lose not in name}
            for engine in self.engines:
                engine.load(arrived, self.weight_version)
            named_tensors.clear()
            return "refs"

    setattr(Updater, send, Updater.sent)
    return Updater


@pytest.fixture
def engine():
    engine = FakeEngine()
    with served(engine.answer) as url:
        yield engine, url


@pytest.mark.parametrize("send", SENDS)
def test_watched_updates_are_checked(send, engine):
    watched = updater_class(send)
    watch_updates(watched, send, every=2, urls=lambda updater: [*updater.urls, None], digest=digest)
    updater = watched([engine[0]], [engine[1]])
    for _ in range(3):
        updater.update_weights()
    assert engine[0].asked.count("weights_checker") == 2
    assert getattr(updater, send)([("model.norm.weight", torch.ones(8))]) == "refs"
    updater.lose = "layers.1.mlp.experts.2."
    updater.update_weights()  # not checked
    with pytest.raises(CkptkitError, match="update 5"):
        updater.update_weights()


def test_addresses_are_those_of_ray_actors(engine, monkeypatch):
    """An actor of another node of the same engine has none."""
    ray = ModuleType("ray")
    ray.get = list
    monkeypatch.setitem(sys.modules, "ray", ray)
    watched = updater_class("_send_hf_params")
    watch_updates(watched, "_send_hf_params", digest=digest)
    updater = watched([engine[0]], [])
    updater.rollout_engines = [
        SimpleNamespace(get_url=SimpleNamespace(remote=lambda found=found: found)) for found in (engine[1], None)
    ]
    updater.update_weights()
    assert engine[0].asked.count("weights_checker") == 1


@pytest.mark.parametrize(("when", "checks"), [({}, 0), ({"when": lambda updater: True}, 1)])
def test_other_ranks_check_where_that_is_asked_for(when, checks, engine, monkeypatch):
    watched = updater_class("_send_hf_params")
    watch_updates(watched, "_send_hf_params", urls=lambda updater: updater.urls, digest=digest, **when)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    watched([engine[0]], [engine[1]]).update_weights()
    assert engine[0].asked.count("weights_checker") == checks
    assert bool(engine[0].asked) is bool(checks)


class Adapter:
    """Sends as verl 0210b18's `ServerAdapter` does, on every rank of an engine; one of them knows the server."""

    def __init__(self, engine, rollout_rank):
        self.engine, self.rollout_rank, self.lose = engine, rollout_rank, ""

    async def update_weights(self, pairs, global_steps=None):
        taken = [pair async for pair in pairs] if hasattr(pairs, "__aiter__") else list(pairs)
        self.engine.load({name: one for name, one in taken if not self.lose or self.lose not in name}, global_steps)
        return "done"


async def asynchronous(version):
    for pair in weights(version).items():
        yield pair


@pytest.mark.parametrize("later", [False, True])
def test_watched_rollout_is_checked_on_the_rank_that_knows_its_server(later):
    engine = FakeVllm()
    with served(engine.answer) as url:
        kind = type("Watched", (Adapter,), {"update_weights": Adapter.update_weights})
        watch_rollout(kind, urls=lambda one: [url] if one.rollout_rank == 0 else [], every=2)
        with pytest.raises(CkptkitError, match="Watched is already"):
            watch_rollout(kind)
        first, other = kind(engine, 0), kind(engine, 1)

        def sent(version):
            return asynchronous(version) if later else iter(weights(version).items())

        assert asyncio.run(other.update_weights(sent(1), global_steps=1)) == "done"
        assert engine.asked == []
        assert asyncio.run(first.update_weights(sent(1), global_steps=1)) == "done"
        first.lose = ".layers.1."
        asyncio.run(first.update_weights(sent(2), global_steps=2))  # not due
        with pytest.raises(CkptkitError, match=r"layers\.1\."):
            asyncio.run(first.update_weights(sent(3), global_steps=3))


def test_classes_that_cannot_be_watched_are_refused():
    watched = updater_class("_send_hf_params")
    with pytest.raises(CkptkitError, match="has no method _send_weights"):
        watch_updates(watched, "_send_weights")
    watch_updates(watched, "_send_hf_params")
    with pytest.raises(CkptkitError, match="already watched"):
        watch_updates(watched, "_send_hf_params")
    with pytest.raises(CkptkitError, match="Other has no coroutine update_weights"):
        watch_rollout(type("Other", (), {"update_weights": lambda self, weights: None}))


def test_address_of_a_server_in_a_ray_actor(monkeypatch):
    engine = FakeVllm()
    with served(engine.answer) as url:
        host, port = url.removeprefix("http://").split(":")
        ray = ModuleType("ray")
        ray.get = lambda reference: reference
        monkeypatch.setitem(sys.modules, "ray", ray)

        class Verl(Adapter):
            update_weights = Adapter.update_weights

            def _ensure_server_handle(self):
                address = SimpleNamespace(remote=lambda: (host, int(port)))
                self.server_handle = SimpleNamespace(get_server_address=address)
                return True

        watch_rollout(Verl)
        for rank, is_asked in ((1, False), (0, True)):
            assert asyncio.run(Verl(engine, rank).update_weights(iter(weights(1).items()))) == "done"
            assert ("weight_checker" in engine.asked) == is_asked
