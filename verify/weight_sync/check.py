"""Holds what a trainer sends in a weight update against the checksums of the engines that received it.

The weight checkers of SGLang and vLLM give a checksum of each of their parameters on each rank. Those are fused and
cut; from the tensors that were sent the same checksums are computed here, with the engine's own function.
"""

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
    "do not generate with these weights: send the whole update again. "
    "`ckptkit verify HF --update` tells whether the engine can take updates at all"
)
_LOST_HINT = "send the whole update before the next generation: vLLM's sleep level 2 keeps no weights"


class WeightSyncCheck:
    """Checks every Nth weight update of a trainer at the engines that it was sent to.

    Call `record` with each tensor as it is sent, under its HF name, and `after_update` once engines have answered. A
    trainer with several senders has one check in each, and each checks what it sent itself.

    What it proves: every engine has the weight version; the ranks named as compared by value hold, bit for bit, what
    was recorded (a checksum of 64 bits, of vLLM's own checker 256); engines that keep weights alike hold the same;
    other parameters changed if and only if what was sent for them did. What it does not: that the trainer recorded the
    right values under the right names, and that the engine computes with a parameter as its name says. `ckptkit verify`
    is for that.

    The first check learns how each kind of parameter is cut. A kind of which no layer is found there is compared by
    change only, and said on standard error once. So the first check must not be the first time that something can be
    wrong: let it be the update before the first rollout, as trainers do.
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

        `program`: what they run. Of vLLM, `engines` may also be the `collective_rpc` of each, such as that of a
        `vllm.LLM`, whose `worker_extension_cls` is then `ckptkit.hooks_vllm.WeightReader`.
        `tensors`: a regular expression; only HF names that it finds are looked at. `room`: bytes of tensors that are
        kept on their device until a parameter of theirs is complete. `headers`: go with each request, for engines with
        an API key. `timeout`: seconds for each answer. `digest`: of a tensor, if not the engine's own (`tensor_hash` of
        SGLang, SHA-256 of vLLM's checker). Raises CkptkitError where SGLang's is wanted and SGLang is not installed.
        """
        if every < 1:
            raise CkptkitError(f"every is {every}", "give 1 to check each update, N to check every Nth")
        self.seconds = 0.0
        self._every, self._updates = every, 0
        self._wanted = re.compile(tensors or "")
        self._room, self._headers, self._timeout = room, dict(headers or {}), timeout
        if program not in ("sglang", "vllm"):
            raise CkptkitError(f"program is {program!r}", "it may be 'sglang' or 'vllm'")
        self._program: Program = program
        self._digest: Digest = digest or (vllm_digest if program == "vllm" else sglang_digest())
        self._own_digest = digest is None
        self._setups: dict[str, Setup] = {}
        self._known = SyncHistory()
        self._sent: Sent | None = None
        self._spent = 0.0
        self._said = frozenset[str]()
        self.use(engines)

    def use(self, engines: str | Rpc | Iterable[str | Rpc]) -> None:
        """Names the engines anew, for instance after some were started again. What was learned stays.

        Asks those that are no address how they were started: during an update their workers may be busy with it.
        """
        given = [engines] if isinstance(engines, str) or callable(engines) else list(engines)
        if not given:
            raise CkptkitError("there is no engine to check", "name the address of each engine")
        self._engines = [self._engine(one, f"engine {number}") for number, one in enumerate(given, 1)]
        self._setups = {}
        others = sum(not isinstance(one, str) for one in given)
        if others and self._program == "sglang":
            raise CkptkitError(f"{others} engines of SGLang are no address", "give addresses")
        if others:
            self._learn_setups()

    def _engine(self, given: str | Rpc, name: str) -> Engine:
        if not isinstance(given, str):
            return VllmEngine(name, None, given)
        server = JsonServer(given.rstrip("/"), self._headers, self._timeout)
        return VllmEngine(server.url, server) if self._program == "vllm" else SglangEngine(server)

    @property
    def due(self) -> bool:
        """Whether the update under way is checked. The first is, and every Nth after it."""
        return self._updates % self._every == 0

    def record(self, name: str, tensor: Tensor) -> None:
        """Takes note of a tensor that is sent under this HF name: full, unsharded, with the values that are sent.

        Waits for the tensor's device. Does nothing in an update that is not checked.
        """
        if not self.due or not self._wanted.search(name):
            return
        with self._timed():
            if self._sent is None:
                self._sent = self._begin()
            self._sent.add(name, tensor)

    def after_update(self, version: str | int | None = None) -> SyncResult | None:
        """Asks every engine, all at once, and compares; None in an update that is not checked. Takes all its ranks.

        `version`: the weight version that engines were given, which is compared where they tell theirs; None: none was.
        Raises CkptkitError naming engines, ranks, parameters and weight versions where anything is wrong, where an
        engine or one of its ranks does not answer, and where nothing was recorded.
        """
        due, sent, self._sent = self.due, self._sent, None
        self._updates += 1
        name = str(self._updates if version is None else version)
        if not due:
            return None
        with self._timed():
            if sent is None:
                raise CkptkitError(
                    f"weight update {name}: no tensor was recorded, so nothing can be checked",
                    "call `record` for each tensor that is sent",
                )
            with waiting("the checksums of what was sent"):
                sent.finish()
            states = self._states()
            verdict = judge(name, sent, states, self._setups, self._known, whole=not self._wanted.pattern)
            self._raise(version is not None, states, verdict)
            self._known = verdict.known
        result, self._spent = replace(verdict.result, seconds=self._spent), 0.0
        self._say(result)
        return result

    def after_resume(self) -> int:
        """Holds every engine against its last check, where memory was released and resumed and nothing was sent since.

        Returns how many parameters were compared. Raises CkptkitError naming those that are not as they were, and where
        there was no check of these engines yet.
        """
        if not self._known.held:
            raise CkptkitError("no earlier check of these engines is known", "call after_update first")
        with self._timed():
            self._learn_setups()
            count, wrong = changed_since(self._states(), self._setups, self._known)
        if wrong:
            raise CkptkitError("engines lost what they held at the last check", _LOST_HINT, first_lines(wrong))
        return count

    def _learn_setups(self) -> None:
        if not self._setups:
            self._setups = self._asked(lambda engine: engine.setup())

    def _begin(self) -> Sent:
        self._learn_setups()
        sizes = {setup.sizes[0] for setup in self._setups.values()}
        digests = {setup.digest for setup in self._setups.values()}
        if len(digests) > 1:
            raise CkptkitError(
                "some of these engines answer /weight_checker (vLLM 0.32 and later), and others by a worker extension",
                "their checksums differ: have one check for each kind",
            )
        counts = {param: len(sources) for param, sources in self._known.sources.items()}
        return Sent(digests.pop() or self._digest, sizes, self._known.cuts_of(self._setups), counts, self._room)

    def _states(self) -> dict[str, EngineState]:
        return self._asked(lambda engine: engine.state(self._setups[engine.name]))

    def _asked(self, question: Callable[[Engine], _Answer]) -> dict[str, _Answer]:
        """The answer of each engine, by its name."""
        with ThreadPoolExecutor(len(self._engines)) as pool:
            answers = list(pool.map(question, self._engines))
        return dict(zip([one.name for one in self._engines], answers, strict=True))

    def _raise(self, told: bool, states: Mapping[str, EngineState], verdict: SyncVerdict) -> None:
        """`told`: engines were given the weight version."""
        version = verdict.result.version
        wrong = [
            f"{url} has weight version {state.version}, not {version}"
            for url, state in states.items()
            if told and state.version not in (None, version)
        ]
        wrong += verdict.wrong
        # Of a whole model the norms are always kept as they are sent.
        if verdict.compared and not verdict.result.by_value and not self._wanted.pattern:
            as_here = (computes_as(setup.version) for setup in self._setups.values())  # as far as versions tell
            if self._program == "vllm" or not self._own_digest or all(as_here):
                wrong.append(f"none of the values that were sent is in {', '.join(states)}")
        if wrong:
            raise CkptkitError(f"weight update {version} did not arrive as sent", _HINT, first_lines(wrong))

    def _say(self, result: SyncResult) -> None:
        news = {
            "not compared by value": result.unseen,
            "sent, and no engine has a parameter of this name": result.absent,
            "held by engines, and nothing was sent for them": result.not_sent,
        }
        lines = [f"{what}: {summarize(names)}" for what, names in news.items() if names]
        for line in lines:
            if line not in self._said:
                say(f"weight update {result.version}: {line}")
        self._said |= set(lines)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - start
            self._spent += took
            self.seconds += took
