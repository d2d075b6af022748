"""Holds what a trainer sends in a weight update against the checksums of the engines that received it.

SGLang's own weight checker gives a checksum of each of its parameters on each rank. Those are fused and cut; from the
tensors that were sent the same checksums are computed here, with SGLang's own function.
Source: SGLang 0.5.16, `srt/utils/weight_checker.py` and `srt/managers/mm_utils.py`.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version as installed
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from ckptkit.app.job.engines import Engine, Setup, State, waiting
from ckptkit.app.job.judged import Judged, Known, judge
from ckptkit.app.job.sent import Sent
from ckptkit.core.errors import CkptkitError, MissingDependencyError
from ckptkit.core.printable import printable
from ckptkit.core.specs import summarize

if TYPE_CHECKING:
    from torch import Tensor

    from ckptkit.app.job.predicted import Digest

_Answer = TypeVar("_Answer")
_SHOWN = 20  # lines of a message
_HINT = (
    "do not generate with these weights: send the whole update again. "
    "`ckptkit verify HF --update` tells whether the engine can take updates at all"
)


@dataclass(frozen=True)
class SyncResult:
    """What one check looked at, over all ranks of all engines.

    `by_value`: parameters whose checksum is that of the tensors sent. `by_change`: of the others, those that changed
    exactly if a tensor of theirs did since the last check. `unseen`: names of parameters sent but not compared by
    value, since the engine keeps them in a layout of its own, or there was no room to put them together. `absent`:
    tensors that no rank has a parameter for. `seconds`: what this check took, its records included.
    """

    version: str
    engines: int
    by_value: int
    by_change: int
    unseen: Sequence[str]
    absent: Sequence[str]
    seconds: float


class WeightSyncCheck:
    """Checks every Nth weight update of a trainer at the engines that it was sent to.

    Call `record` with each tensor as it is sent, under its HF name, and `after_update` once engines have answered. A
    trainer with several senders has one check in each, and each checks what it sent itself.

    What it proves: every engine has the weight version; the ranks named as compared by value hold, bit for bit, what
    was recorded (a checksum of 64 bits); engines that keep weights alike hold the same; other parameters changed if and
    only if what was sent for them did. What it does not: that the trainer recorded the right values under the right
    names, and that SGLang computes with a parameter as its name says. `ckptkit verify` and CK604 are for that.

    The first check learns how each kind of parameter is cut. A kind of which no layer is found there is compared by
    change only, and said on standard error once. So the first check must not be the first time that something can be
    wrong: let it be the update before the first rollout, as trainers do.
    """

    def __init__(
        self,
        engines: str | Iterable[str],
        *,
        every: int = 1,
        tensors: str | None = None,
        room: int = 1 << 30,
        headers: Mapping[str, str] | None = None,
        timeout: float = 300.0,
        digest: Digest | None = None,
    ) -> None:
        """`engines`: addresses such as `http://10.0.0.1:30000`, of engines and not of a router before them.

        `tensors`: a regular expression; only HF names that it finds are looked at. `room`: bytes of tensors that are
        kept on their device until a parameter of theirs is complete. `headers`: go with each request, for engines with
        an API key. `timeout`: seconds for each answer. `digest`: of a tensor, if not SGLang's own (`tensor_hash`).
        Raises CkptkitError where SGLang is not installed and no `digest` is given.
        """
        if every < 1:
            raise CkptkitError(f"every is {every}", "give 1 to check each update, N to check every Nth")
        self.seconds = 0.0
        self._every, self._updates = every, 0
        self._wanted = re.compile(tensors or "")
        self._room, self._headers, self._timeout = room, dict(headers or {}), timeout
        self._digest = digest or sglang_digest()
        self._own_digest = digest is None
        self._setups: dict[str, Setup] = {}
        self._known = Known()
        self._sent: Sent | None = None
        self._spent = 0.0
        self._said = frozenset[str]()
        self.use(engines)

    def use(self, engines: str | Iterable[str]) -> None:
        """Names the engines anew, for instance after some were started again. What was learned stays."""
        urls = [engines] if isinstance(engines, str) else list(engines)
        if not urls:
            raise CkptkitError("there is no engine to check", "name the address of each engine")
        self._engines = [Engine(url.rstrip("/"), self._headers, self._timeout) for url in urls]
        self._setups = {}

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

    def after_update(self, version: str | int) -> SyncResult | None:
        """Asks every engine, all at once, and compares; None in an update that is not checked. Takes all its ranks.

        Raises CkptkitError naming engines, ranks, parameters and weight versions where anything is wrong, where an
        engine or one of its ranks does not answer, and where nothing was recorded.
        """
        due, sent, self._sent = self.due, self._sent, None
        self._updates += 1
        if not due:
            return None
        with self._timed():
            if sent is None:
                raise CkptkitError(
                    f"weight update {version}: no tensor was recorded, so nothing can be checked",
                    "call `record` for each tensor that is sent",
                )
            with waiting("the checksums of what was sent"):
                sent.finish()
            states = dict(zip([one.url for one in self._engines], self._asked(Engine.state), strict=True))
            judged = judge(sent, states, self._setups, self._known)
            self._raise(str(version), states, judged)
            self._known = judged.known
        result = SyncResult(
            str(version), len(states), judged.by_value, judged.by_change, judged.unseen, judged.absent, self._spent
        )
        self._spent = 0.0
        self._say(result)
        return result

    def _begin(self) -> Sent:
        if not self._setups:
            self._setups = dict(zip([one.url for one in self._engines], self._asked(Engine.setup), strict=True))
        sizes = {setup.tp for setup in self._setups.values()}
        return Sent(self._digest, sizes, self._known.cuts_of(self._setups), self._known.counts, self._room)

    def _asked(self, question: Callable[[Engine], _Answer]) -> list[_Answer]:
        with ThreadPoolExecutor(len(self._engines)) as pool:
            return list(pool.map(question, self._engines))

    def _raise(self, version: str, states: Mapping[str, State], judged: Judged) -> None:
        wrong = [
            f"{url} has weight version {state.version}, not {version}"
            for url, state in states.items()
            if state.version != version
        ]
        wrong += judged.wrong
        # Of a whole model the norms are always kept as they are sent.
        if judged.compared and not judged.by_value and not self._wanted.pattern and self._same_function():
            wrong.append(f"none of the values that were sent is in {', '.join(states)}")
        if wrong:
            rest = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
            raise CkptkitError(f"weight update {version} did not arrive as sent", _HINT, [*wrong[:_SHOWN], *rest])

    def _same_function(self) -> bool:
        """Whether the engines compute checksums as we do, as far as versions tell."""
        own = None if not self._own_digest or find_spec("sglang") is None else installed("sglang")
        return own is None or all(setup.version == own for setup in self._setups.values())

    def _say(self, result: SyncResult) -> None:
        news = {
            f"not compared by value: {summarize(result.unseen)}": result.unseen,
            f"sent, and no engine has a parameter of this name: {summarize(result.absent)}": result.absent,
        }
        for line, names in news.items():
            if names and line not in self._said:
                print(printable(f"ckptkit: weight update {result.version}: {line}"), file=sys.stderr)
                self._said |= {line}

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - start
            self._spent += took
            self.seconds += took


def sglang_digest() -> Digest:
    """SGLang's own function for the checksum of a tensor, on a GPU where there is one: it gives another on a CPU."""
    if find_spec("sglang") is None:
        raise MissingDependencyError(
            "SGLang is not installed here, and its checksums are needed", "install the engines' SGLang"
        )
    import torch
    from sglang.srt.managers.mm_utils import tensor_hash

    cuda = torch.cuda.is_available()

    def digest(tensor: Tensor) -> str:
        return f"{tensor_hash(tensor.cuda() if cuda else tensor):016x}"

    return digest
