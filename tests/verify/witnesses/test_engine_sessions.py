"""The requests of a weight update to engines of both kinds of releases, with engines that only keep models."""

import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support import models
from torch import nn

from ckptkit.core.errors import CkptkitError
from ckptkit.quant.online import sglang_reload
from ckptkit.verify.witnesses.live.job import EngineJob
from ckptkit.verify.witnesses.live.server import RefusedByEngine
from ckptkit.verify.witnesses.sglang.live import server as server_module
from ckptkit.verify.witnesses.sglang.live.readback import POISON, RECORD
from ckptkit.verify.witnesses.sglang.live.server import BEGIN, END, SglangServer, serve

HERE = Path(__file__)


class Qwen3ForCausalLM(nn.Module):
    """Stands for SGLang's class of this name: it loads by the names of its parameters and skips all others."""

    names: tuple[str, ...] = ("model.norm", "lm_head")

    def __init__(self):
        super().__init__()
        self.loaded: list[str] = []
        for name in self.names:
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.zeros(4), requires_grad=False))

    def load_weights(self, weights):
        for name, tensor in weights:
            self.loaded.append(name)
            if (own := name.replace(".", "_")) in self._parameters:
                self._parameters[own].copy_(tensor)


class Qwen3ForCausalLMNextN(Qwen3ForCausalLM):
    names = ("mtp.fc",)


class Engine:
    """The requests of SGLang 0.5.16 that the witness sends, for a target and perhaps a draft model."""

    def __init__(self, *models):
        self.models = models
        self.sent: list[str | None] = []

    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
        self.sent.append(load_format)
        for model in self.models:
            if load_format in (BEGIN, END):
                continue
            loader = named(load_format) if load_format else None
            _ = loader(model, named_tensors) if loader else model.load_weights(named_tensors)
        return True, "Success"

    def update_weights_from_disk(self, model_path, load_format=None):
        self.sent.append("disk")
        return True, "Success"

    def release_memory_occupation(self, tags=None):
        self.sent.append("release")

    def resume_memory_occupation(self, tags=None):
        self.sent.append("resume")

    def flush_cache(self):
        self.sent.append("flush")


class SessionEngine(Engine):
    """The same of SGLang 0.5.23: weights are refused outside a session, and its end repacks what the selector names."""

    open: str | None = None
    repacked: Sequence[str] = ()

    def begin_weight_update(self, selector="all"):
        if self.open is not None:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self.open = selector
        self.sent.append(f"begin {selector}")
        return True, "Success"

    def end_weight_update(self):
        if self.open is None:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self.repacked = [*self.repacked, self.open]
        self.open = None
        self.sent.append("end")
        return True, "Success"

    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
        if self.open is None:
            return False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
        return super().update_weights_from_tensor(named_tensors, load_format, flush_cache)


def named(loader):
    module, _, name = loader.rpartition(".")
    return getattr(import_module(module), name)


WEIGHTS = {name: torch.arange(4.0) + at for at, name in enumerate(("model.norm", "lm_head", "mtp.fc"))}
CHECKPOINT = SimpleNamespace(
    config={"architectures": ["Qwen3ForCausalLM"]},
    groups=[list(WEIGHTS)],
    read=lambda names: {name: WEIGHTS[name] for name in names},
)


def server(engine, root, **job):
    return SglangServer(EngineJob("model", [], str(root / "report"), **job), CHECKPOINT, engine, device="cpu")


@pytest.mark.parametrize(
    ("kind", "packed", "sent", "from_disk"),
    [
        (Engine, {}, [None, "flush"], True),
        (Engine, {"experts": "CompressedTensorsWNA16MoE"}, [BEGIN, None, END, "flush"], False),
        # It undoes its repacking by itself, there too.
        (SessionEngine, {"experts": "CompressedTensorsWNA16MoE"}, ["begin all", None, "end", "flush"], True),
    ],
)
def test_packed_experts_are_opened_and_closed_where_the_engine_does_not(kind, packed, sent, from_disk, tmp_path):
    engine = kind(Qwen3ForCausalLM())
    one = server(engine, tmp_path)
    one.packed = packed
    one.update_by_tensor()
    assert engine.sent == sent
    assert (named(BEGIN), named(END)) == (sglang_reload.begin, sglang_reload.end)
    assert torch.equal(engine.models[0].lm_head, WEIGHTS["lm_head"])
    if not from_disk:
        with pytest.raises(RefusedByEngine):
            one.update_from_disk()
        return
    one.update_from_disk()
    assert engine.sent[len(sent) :] == ["disk"]


def test_looking_and_poisoning_never_repack_the_model(tmp_path):
    engine = SessionEngine(Qwen3ForCausalLM())
    one = server(engine, tmp_path)
    assert list(one.held()) == ["0 model_norm", "0 lm_head"]
    one.release_and_resume()
    assert engine.sent == ["begin draft", RECORD, "end", "release", "resume", "begin draft", POISON, "end"]
    assert engine.repacked == ["draft", "draft"]
    assert engine.models[0].lm_head.isnan().all()


def test_what_a_session_refuses_is_its_own_words_and_nothing_more_is_sent(tmp_path):
    engine = SessionEngine(Qwen3ForCausalLM())
    engine.open = "all"
    with pytest.raises(RefusedByEngine, match="already open"):
        server(engine, tmp_path).update_by_tensor()
    assert engine.sent == []


@pytest.mark.parametrize("kind", [Engine, SessionEngine])
def test_a_draft_model_is_poisoned_updated_and_read_back(kind, tmp_path):
    engine = kind(Qwen3ForCausalLM(), Qwen3ForCausalLMNextN())
    one = server(engine, tmp_path, draft=True)
    one.update_by_tensor()
    before = one.held()
    assert list(before) == ["0 model_norm", "0 lm_head", "0 draft.mtp_fc"]
    one.poison()
    assert {name for name, held in one.held().items() if held != before[name]} == set(before)
    one.update_by_tensor()
    assert one.held() == before


def test_an_engine_that_hides_its_draft_model_is_not_believed(tmp_path):
    one = server(Engine(Qwen3ForCausalLM()), tmp_path, draft=True)
    with pytest.raises(CkptkitError, match="wrote.*0"):
        one.held()


def requests(file, owner):
    tree = ast.parse(file.read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    methods = [one for one in found.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]
    return {
        one.name: ([argument.arg for argument in one.args.args], list(map(ast.unparse, one.args.defaults)))
        for one in methods
    }


@pytest.mark.sglang
def test_these_engines_take_what_sglangs_own_takes():
    """Read from the source of the installed release, since importing it takes long."""
    real, own = (
        requests(Path(find_spec("sglang").origin).parent / "srt/entrypoints/engine.py", "Engine"),
        requests(HERE, "Engine"),
    )
    own |= requests(HERE, "SessionEngine") if "begin_weight_update" in real else {}
    assert {name: real.get(name) for name in own} == own


PACKED = "model.layers.12.eh_proj.weight_packed"
SCALES = "model.layers.12.eh_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("kind", "own", "tensor", "refused"),
    [
        (SessionEngine, "Glm4MoeForCausalLMNextN", "model.layers.12.eh_proj.weight", None),
        (Engine, "Glm4MoeForCausalLMNextN", PACKED, None),
        (SessionEngine, "Glm4MoeForCausalLMNextN", PACKED, PACKED),
        (SessionEngine, "Glm4MoeForCausalLMNextN", SCALES, SCALES),
        (Engine, None, "model.layers.12.eh_proj.weight", "Glm4MoeForCausalLM"),
    ],
)
def test_an_engine_is_not_started_for_a_draft_model_that_cannot_be_read_back(kind, own, tensor, refused, monkeypatch):
    started = []
    fake = ModuleType("sglang")
    fake.Engine = type("Engine", (kind,), {"__init__": lambda self, **given: started.append(given)})
    monkeypatch.setitem(sys.modules, "sglang", fake)
    monkeypatch.setattr(server_module, "draft_class", lambda path: own)
    config = models.configs()["glm4_moe"].to_dict()
    config |= {"num_nextn_predict_layers": 1, "architectures": ["Glm4MoeForCausalLM"]}
    checkpoint = SimpleNamespace(config=config, specs=[tensor])
    if refused is not None:
        with pytest.raises(CkptkitError, match=refused):
            serve(EngineJob("model", [], draft=True), checkpoint)
        assert started == []
        return
    serve(EngineJob("model", [], draft=True), checkpoint)
    (given,) = started
    assert {name: value for name, value in given.items() if name.startswith("speculative_")} == {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": "model",
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 2,
    }
