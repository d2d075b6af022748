"""The requests of a weight update to engines of both kinds of releases, with engines that only keep models."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support import models
from torch import Tensor, nn

from ckptkit.core.errors import CkptkitError
from ckptkit.quant.online import sglang_reload
from ckptkit.verify.witnesses.live.job import EngineJob
from ckptkit.verify.witnesses.live.server import RefusedByEngine
from ckptkit.verify.witnesses.sglang.live import server as server_module
from ckptkit.verify.witnesses.sglang.live.readback import POISON, RECORD
from ckptkit.verify.witnesses.sglang.live.server import BEGIN, END, SglangServer, start_engine

Answer = tuple[bool, str]


class Qwen3ForCausalLM(nn.Module):
    """Stands for SGLang's class of this name: it loads by the names of its parameters and skips all others."""

    names: tuple[str, ...] = ("model.norm", "lm_head")

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        for name in self.names:
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.zeros(4), requires_grad=False))

    def load_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.loaded.append(name)
            if (own := name.replace(".", "_")) in self._parameters:
                self._parameters[own].copy_(tensor)  # type: ignore[union-attr]


class Qwen3ForCausalLMNextN(Qwen3ForCausalLM):
    names = ("mtp.fc",)


class Engine:
    """The requests of SGLang 0.5.16 that the witness sends, for a target and perhaps a draft model."""

    def __init__(self, *models: nn.Module) -> None:
        self.models = models
        self.sent: list[str | None] = []
        self.reached: list[Sequence[nn.Module]] = []

    def update_weights_from_tensor(
        self, named_tensors: Sequence[tuple[str, Tensor]], load_format: str | None = None, flush_cache: bool = True
    ) -> Answer:
        self.sent.append(load_format)
        for model in self.models:
            if load_format in (BEGIN, END):
                continue
            loader = named(load_format) if load_format else None
            _ = loader(model, named_tensors) if loader else model.load_weights(named_tensors)  # type: ignore[operator]
        return True, "Success"

    def update_weights_from_disk(self, model_path: str, load_format: str | None = None) -> Answer:
        self.sent.append("disk")
        return True, "Success"

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        self.sent.append("release")

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        self.sent.append("resume")

    def flush_cache(self) -> None:
        self.sent.append("flush")


class SessionEngine(Engine):
    """The same of SGLang 0.5.23: weights are refused outside a session, and its end repacks what the selector names."""

    open: str | None = None
    repacked: Sequence[str] = ()

    def begin_weight_update(self, selector: str = "all") -> Answer:
        if self.open is not None:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self.open = selector
        self.sent.append(f"begin {selector}")
        return True, "Success"

    def end_weight_update(self) -> Answer:
        if self.open is None:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self.repacked = [*self.repacked, self.open]
        self.open = None
        self.sent.append("end")
        return True, "Success"

    def update_weights_from_tensor(
        self, named_tensors: Sequence[tuple[str, Tensor]], load_format: str | None = None, flush_cache: bool = True
    ) -> Answer:
        if self.open is None:
            return False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
        return super().update_weights_from_tensor(named_tensors, load_format, flush_cache)


def named(loader: str) -> Callable[..., None]:
    module, _, name = loader.rpartition(".")
    found: Callable[..., None] = getattr(import_module(module), name)
    return found


WEIGHTS = {name: torch.arange(4.0) + at for at, name in enumerate(("model.norm", "lm_head", "mtp.fc"))}
CHECKPOINT: Any = SimpleNamespace(
    config={"architectures": ["Qwen3ForCausalLM"]},
    groups=[list(WEIGHTS)],
    read=lambda names: {name: WEIGHTS[name] for name in names},
)


def server(engine: Engine, root: Path, **job: Any) -> SglangServer:
    return SglangServer(EngineJob("model", [], str(root / "report"), **job), CHECKPOINT, engine, device="cpu")


def test_an_engine_without_sessions_is_sent_weights_at_any_time(tmp_path: Path) -> None:
    engine = Engine(Qwen3ForCausalLM())
    one = server(engine, tmp_path)
    one.poison()
    one.update_by_tensor()
    one.update_from_disk()
    assert engine.sent == [POISON, None, "flush", "disk"]
    assert torch.equal(engine.models[0].lm_head, WEIGHTS["lm_head"])  # type: ignore[arg-type]


def test_packed_experts_are_opened_and_closed_where_there_are_no_sessions(tmp_path: Path) -> None:
    engine = Engine(Qwen3ForCausalLM())
    one = server(engine, tmp_path)
    one.packed = {"experts": "CompressedTensorsWNA16MoE"}
    one.update_by_tensor()
    assert engine.sent == [BEGIN, None, END, "flush"]
    assert named(BEGIN) is sglang_reload.begin
    assert named(END) is sglang_reload.end
    with pytest.raises(RefusedByEngine, match="not tried"):
        one.update_from_disk()


def test_an_engine_with_sessions_is_updated_within_one(tmp_path: Path) -> None:
    engine = SessionEngine(Qwen3ForCausalLM())
    one = server(engine, tmp_path)
    one.packed = {"experts": "CompressedTensorsWNA16MoE"}
    one.update_by_tensor()
    assert engine.sent == ["begin all", None, "end", "flush"]
    one.update_from_disk()  # it undoes its repacking there too
    assert engine.sent[4:] == ["disk"]


def test_looking_and_poisoning_never_repack_the_model(tmp_path: Path) -> None:
    engine = SessionEngine(Qwen3ForCausalLM())
    one = server(engine, tmp_path)
    assert list(one.held()) == ["0 model_norm", "0 lm_head"]
    one.release_and_resume()
    assert engine.sent == ["begin draft", RECORD, "end", "release", "resume", "begin draft", POISON, "end"]
    assert engine.repacked == ["draft", "draft"]
    assert engine.models[0].lm_head.isnan().all()  # type: ignore[union-attr, operator]


def test_what_a_session_refuses_is_its_own_words_and_nothing_more_is_sent(tmp_path: Path) -> None:
    engine = SessionEngine(Qwen3ForCausalLM())
    engine.open = "all"
    with pytest.raises(RefusedByEngine, match="already open"):
        server(engine, tmp_path).update_by_tensor()
    assert engine.sent == []


@pytest.mark.parametrize("kind", [Engine, SessionEngine])
def test_a_draft_model_is_poisoned_updated_and_read_back(kind: type[Engine], tmp_path: Path) -> None:
    engine = kind(Qwen3ForCausalLM(), Qwen3ForCausalLMNextN())
    one = server(engine, tmp_path, draft=True)
    one.update_by_tensor()
    before = one.held()
    assert list(before) == ["0 model_norm", "0 lm_head", "0 draft.mtp_fc"]
    one.poison()
    assert {name for name, held in one.held().items() if held != before[name]} == set(before)
    one.update_by_tensor()
    assert one.held() == before


def test_an_engine_that_hides_its_draft_model_is_not_believed(tmp_path: Path) -> None:
    one = server(Engine(Qwen3ForCausalLM()), tmp_path, draft=True)
    with pytest.raises(CkptkitError, match="wrote.*0"):
        one.held()


def requests(source: str, owner: str) -> Iterator[tuple[str, Mapping[str, str | None]]]:
    """The methods of a class, each with its parameters and their defaults as they are written."""
    tree = ast.parse(source)
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    for method in found.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            names = [argument.arg for argument in method.args.args]
            defaults = [None] * (len(names) - len(method.args.defaults)) + list(map(ast.unparse, method.args.defaults))
            yield method.name, dict(zip(names, defaults, strict=True))


@pytest.mark.sglang
def test_these_engines_take_what_sglangs_own_takes() -> None:
    """Read from the source of the installed release, since importing it takes long."""
    root = Path(find_spec("sglang").submodule_search_locations[0])  # type: ignore[union-attr, index]
    real = dict(requests((root / "srt/entrypoints/engine.py").read_text(), "Engine"))
    own = dict(requests(Path(__file__).read_text(), "Engine"))
    own |= dict(requests(Path(__file__).read_text(), "SessionEngine")) if "begin_weight_update" in real else {}
    assert {name: real.get(name) for name in own} == own


@pytest.mark.parametrize(
    ("sessions", "own", "leaf", "refused"),
    [
        (True, "Glm4MoeForCausalLMNextN", "weight", None),
        (False, "Glm4MoeForCausalLMNextN", "weight_packed", None),
        (
            True,
            "Glm4MoeForCausalLMNextN",
            "weight_packed",
            "would repack model.layers.12.eh_proj.weight_packed a second",
        ),
        (True, "Glm4MoeForCausalLMNextN", "weight_scale_inv", "leave the multi-token prediction layers unquantized"),
        (False, None, "weight", "Glm4MoeForCausalLM"),
    ],
)
def test_an_engine_is_not_started_for_a_draft_model_that_cannot_be_read_back(
    sessions: bool, own: str | None, leaf: str, refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Mapping[str, Any]] = []
    fake: Any = ModuleType("sglang")
    fake.Engine = type(
        "Engine", (SessionEngine if sessions else Engine,), {"__init__": lambda self, **a: started.append(a)}
    )
    monkeypatch.setitem(sys.modules, "sglang", fake)
    monkeypatch.setattr(server_module, "draft_class", lambda path: own)
    config = models.configs()["glm4_moe"].to_dict()
    named = {"num_nextn_predict_layers": 1, "architectures": ["Glm4MoeForCausalLM"]}
    checkpoint: Any = SimpleNamespace(config=config | named, specs=[f"model.layers.12.eh_proj.{leaf}"])
    job = EngineJob("model", [], draft=True)
    if refused is None:
        start_engine(job, checkpoint)
        (asked,) = started
        assert {name: value for name, value in asked.items() if name.startswith("speculative_")} == {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": "model",
            "speculative_num_steps": 1,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 2,
        }
        return
    with pytest.raises(CkptkitError) as error:
        start_engine(job, checkpoint)
    assert refused in f"{error.value.message} {error.value.hint}"
    assert started == []
