"""Compares the tensors of a weight update with the checksums that the engines' weight checkers return."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeVar

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import summarize
from ckptkit.verify.weight_sync.engines import Digest, EngineState, JsonServer, Setup
from ckptkit.verify.weight_sync.judge import SyncHistory, SyncResult, SyncVerdict, changed_since, judge
from ckptkit.verify.weight_sync.messages import first_lines, say, waiting
from ckptkit.verify.weight_sync.predicted import Sent
from ckptkit.verify.weight_sync.sglang import SglangEngine, computes_as, sglang_digest
from ckptkit.verify.weight_sync.vllm import Rpc, VllmEngine, vllm_digest

if TYPE_CHECKING:
    from torch import Tensor

Program = Literal["sglang", "vllm"]
Engine = SglangEngine | VllmEngine
_Answer = TypeVar("_Answer")
_HINT = (
    "send the complete update again before the next generation. "
    "`ckptkit verify HF --update` checks whether the engine supports updates"
)
_LOST_HINT = "send the complete update before the next generation: vLLM's sleep level 2 keeps no weights"


class WeightSyncCheck:
    """Checks every Nth weight update of a trainer at the engines that received it (docs/jobs.md).

    Call `record` with each tensor that is sent, under its HF name, and `after_update` once engines have answered. Each
    of several senders has its own check. The first check learns how each kind of parameter is cut, so let it be the
    update before the first rollout: a kind that matches in no layer is compared by change only, with a note.
    """

    def __init__(
        self,
        engines: str | Rpc | Iterable[str | Rpc],
        *,
        program: Program = "sglang",
        every: int = 1,
        tensors: str | None = None,
        room: int = 1 << 30,
        headers: Mapping[str, str] | None = None,
        timeout: float = 300.0,
        digest: Digest | None = None,
    ) -> None:
        """`engines`: addresses such as `http://10.0.0.1:30000`, of engines and not of a router before them.

        For the `program` vLLM, one may also be the `collective_rpc` of a `vllm.LLM` with the `worker_extension_cls`
        `ckptkit.hooks_vllm.WeightReader`. `tensors`: a regular expression for the HF names to check. `room`: bytes of
        tensors that are kept on their device until a parameter is complete. `headers`: of each request, for engines
        with an API key. `timeout`: seconds for each answer. `digest`: of a tensor, in place of the engine's own.
        Raises CkptkitError if SGLang's digest is needed and SGLang is not installed.
        """
        if every < 1:
            raise CkptkitError(f"every is {every}", "pass 1 to check each update, or N to check every Nth")
        self.seconds = 0.0
        self._every, self._updates = every, 0
        self._pattern = re.compile(tensors or "")
        self._room, self._headers, self._timeout = room, dict(headers or {}), timeout
        if program not in ("sglang", "vllm"):
            raise CkptkitError(f"program is {program!r}", "pass 'sglang' or 'vllm'")
        self._program: Program = program
        self._digest: Digest = digest or (vllm_digest if program == "vllm" else sglang_digest())
        self._own_digest = digest is None
        self._setups: dict[str, Setup] = {}
        self._history = SyncHistory()
        self._sent: Sent | None = None
        self._spent = 0.0
        self._notes = frozenset[str]()
        self.use(engines)

    def use(self, engines: str | Rpc | Iterable[str | Rpc]) -> None:
        """Replaces the engines, for instance after some were restarted, and keeps the history."""
        listed = [engines] if isinstance(engines, str) or callable(engines) else list(engines)
        if not listed:
            raise CkptkitError("WeightSyncCheck got no engine", "pass the address of each engine")
        self._engines = [self._engine(one, f"engine {number}") for number, one in enumerate(listed, 1)]
        self._setups = {}
        count = sum(not isinstance(one, str) for one in listed)
        if count and self._program == "sglang":
            raise CkptkitError(f"{count} of the SGLang engines are not addresses", "pass the address of each engine")
        if count:  # during an update their workers may be busy
            self._learn_setups()

    def _engine(self, engine: str | Rpc, name: str) -> Engine:
        if not isinstance(engine, str):
            return VllmEngine(name, None, engine)
        server = JsonServer(engine.rstrip("/"), self._headers, self._timeout)
        return VllmEngine(server.url, server) if self._program == "vllm" else SglangEngine(server.url, server)

    @property
    def due(self) -> bool:
        """Whether the current update is checked: the first one, and every Nth after it."""
        return self._updates % self._every == 0

    def record(self, name: str, tensor: Tensor) -> None:
        """Records a full tensor that is sent under this HF name, if the update is checked. Waits for its device."""
        if not self.due or not self._pattern.search(name):
            return
        with self._timed():
            self._sent = self._sent or self._begin()
            self._sent.add(name, tensor)

    def after_update(self, version: str | int | None = None) -> SyncResult | None:
        """Asks all engines at once and compares every rank; returns None if the update is not checked.

        `version`: the weight version that engines were given, if any. Raises CkptkitError naming all that is wrong.
        """
        due, sent, self._sent = self.due, self._sent, None
        self._updates += 1
        name = str(self._updates if version is None else version)
        if not due:
            return None
        with self._timed():
            if sent is None:
                message = f"weight update {name} cannot be checked, because no tensor was recorded"
                raise CkptkitError(message, "call `record` for each tensor that the trainer sends")
            with waiting("the checksums of the sent tensors"):
                sent.finish()
            states = self._states()
            verdict = judge(name, sent, states, self._setups, self._history, is_complete=not self._pattern.pattern)
            self._raise_errors(version is not None, states, verdict)
            self._history = verdict.history
        result, self._spent = replace(verdict.result, seconds=self._spent), 0.0
        self._print_notes(result)
        return result

    def after_resume(self) -> int:
        """Compares engines with the last check, after a resume, and counts parameters. Raises CkptkitError."""
        if not self._history.held:
            raise CkptkitError("these engines were never checked before", "call after_update first")
        with self._timed():
            self._learn_setups()
            count, wrong = changed_since(self._states(), self._setups, self._history)
        if wrong:
            raise CkptkitError("engines lost their weights since the last check", _LOST_HINT, first_lines(wrong))
        return count

    def _learn_setups(self) -> None:
        self._setups = self._setups or self._ask(lambda engine: engine.setup())

    def _begin(self) -> Sent:
        self._learn_setups()
        sizes = {setup.sizes[0] for setup in self._setups.values()}
        digests = {setup.digest for setup in self._setups.values()}
        if len(digests) > 1:
            message = "some engines answer /weight_checker (vLLM 0.32 and later), but others use a worker extension"
            raise CkptkitError(message, "make one WeightSyncCheck for each kind, since their checksums differ")
        counts = {param: len(sources) for param, sources in self._history.sources.items()}
        return Sent(digests.pop() or self._digest, sizes, self._history.cuts_of(self._setups), counts, self._room)

    def _states(self) -> dict[str, EngineState]:
        return self._ask(lambda engine: engine.state(self._setups[engine.name]))

    def _ask(self, question: Callable[[Engine], _Answer]) -> dict[str, _Answer]:
        with ThreadPoolExecutor(len(self._engines)) as pool:
            return dict(zip([one.name for one in self._engines], pool.map(question, self._engines), strict=True))

    def _raise_errors(self, has_version: bool, states: Mapping[str, EngineState], verdict: SyncVerdict) -> None:
        version = verdict.result.version
        others = {url: state.version for url, state in states.items() if state.version not in (None, version)}
        wrong = [f"{url} has weight version {other}, not {version}" for url, other in others.items() if has_version]
        wrong += verdict.wrong
        # Engines keep the norms of a complete model unchanged.
        if verdict.compared and not verdict.result.by_value and not self._pattern.pattern:
            same_versions = (computes_as(setup.version) for setup in self._setups.values())
            if self._program == "vllm" or not self._own_digest or all(same_versions):
                wrong.append(f"{', '.join(states)}: the engines hold none of the sent values")
        if wrong:
            raise CkptkitError(f"engines do not hold the weights that update {version} sent", _HINT, first_lines(wrong))

    def _print_notes(self, result: SyncResult) -> None:
        notes = {
            "values were not compared": result.unseen,
            "engines have no parameter for these sent tensors": result.absent,
            "nothing was sent for these parameters": result.not_sent,
        }
        lines = [f"{note}: {summarize(names)}" for note, names in notes.items() if names]
        for line in lines:
            if line not in self._notes:
                say(f"weight update {result.version}: {line}")
        self._notes |= set(lines)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self._spent += elapsed
            self.seconds += elapsed
