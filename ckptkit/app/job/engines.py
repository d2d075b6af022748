"""What engines of SGLang answer over HTTP about their weights."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ckptkit.core.errors import CkptkitError, words_of
from ckptkit.core.printable import one_line, printable

Seat = tuple[int, ...]  # of a rank: rank and size of tensor, data and pipeline parallelism
_SEAT = ("tp_rank", "tp_size", "dp_rank", "dp_size", "pp_rank", "pp_size")
# Arguments of a server that decide how it keeps weights; engines that have them alike keep them alike.
_LAYOUT = (
    *("tp_size", "pp_size", "dp_size", "ep_size", "enable_dp_attention", "quantization", "dtype", "device"),
    *("moe_runner_backend", "moe_dense_tp_size", "disable_shared_experts_fusion", "speculative_algorithm"),
)
_EVERY_S = 15.0


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Names what is still waited for on standard error, every 15 s, so that slow and stuck can be told apart."""
    began, done = time.monotonic(), threading.Event()

    def report() -> None:
        while not done.wait(_EVERY_S):
            line = f"ckptkit: {time.monotonic() - began:.0f} s of waiting for {what}"
            print(printable(line), file=sys.stderr, flush=True)

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()


@dataclass(frozen=True)
class Engine:
    """One engine. `headers` go with every request, such as `Authorization`; `timeout` is in seconds."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 300.0

    def setup(self) -> Setup:
        """How it was started (`/server_info`)."""
        found = self._ask("server_info")
        layout = tuple((name, str(found.get(name))) for name in _LAYOUT)
        tp = found.get("tp_size")
        if not isinstance(tp, int) or tp < 1:
            raise CkptkitError(
                f"{self.url}/server_info names no tp_size", "is this an engine, or the router before it?"
            )
        return Setup(str(found.get("version")), tp, found.get("quantization") is not None, layout)

    def state(self) -> State:
        """Its weight version (`/model_info`) and its ranks' checksums (`/weights_checker`).

        Raises CkptkitError where it does not answer, refuses, or answers for some of its ranks only.
        """
        version = self._ask("model_info").get("weight_version")
        answer = self._ask("weights_checker", {"action": "checksum"})
        ranks = answer.get("ranks")
        if not answer.get("success") or not ranks:
            message = "no checksums in its answer" if answer.get("success") else answer.get("message")
            raise CkptkitError(
                f"{self.url}/weights_checker: {message}", "it needs an SGLang that knows the action `checksum`"
            )
        found = {_seat(rank): dict(rank["checksums"]) for rank in ranks}
        if lost := sorted(_promised(found) - set(found)):
            names = ", ".join(f"tensor parallel rank {seat[0]}" for seat in lost)
            raise CkptkitError(f"{self.url}/weights_checker did not answer for {names}", "is the engine whole?")
        return State(None if version is None else str(version), found)

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = Request(  # noqa: S310 - the caller's own address
            f"{self.url}/{path}", data, {"Content-Type": "application/json", **self.headers}
        )
        try:
            with waiting(f"{self.url}/{path}"), urlopen(request, timeout=self.timeout) as answer:  # noqa: S310
                found = json.loads(answer.read())
        except HTTPError as error:
            message = one_line(error.read().decode(errors="replace"))[:300]
            raise CkptkitError(f"{self.url}/{path}: HTTP {error.code}: {message}", "see the engine's log") from error
        except (OSError, HTTPException, ValueError) as error:
            raise CkptkitError(
                f"{self.url}/{path}: {words_of(error)}", "is the engine running, and reachable from here?"
            ) from error
        if not isinstance(found, dict):
            raise CkptkitError(f"{self.url}/{path} answered no JSON object", "is this an engine of SGLang?")
        return found


@dataclass(frozen=True)
class Setup:
    """SGLang's version, tensor parallel size, whether the server quantizes by itself, and what decides its layouts."""

    version: str
    tp: int
    quantizes: bool
    layout: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class State:
    """The weight version of an engine, and the checksums of each of its ranks by parameter."""

    version: str | None
    ranks: Mapping[Seat, Mapping[str, str]]


def _seat(rank: Mapping[str, Any]) -> Seat:
    info = rank["parallelism_info"]
    first = info[0] if isinstance(info, list) else info  # a list of one, or with the draft model's, in later releases
    return tuple(int(first[name]) for name in _SEAT)


def _promised(found: Mapping[Seat, Any]) -> set[Seat]:
    """Every tensor parallel rank beside those that answered."""
    return {(rank, *seat[1:]) for seat in found for rank in range(seat[1])}
