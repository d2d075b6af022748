"""The answers of an engine in a check of weight updates: its setup, and the checksums of its ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ckptkit.core.errors import CkptkitError, words_of
from ckptkit.core.printable import one_line
from ckptkit.verify.weight_sync.messages import waiting

if TYPE_CHECKING:
    from torch import Tensor

Digest = Callable[["Tensor"], str]
Seat = tuple[int, ...]  # of a rank: rank and size of tensor, data, pipeline and prefill context parallelism
_PLACES = ("tensor", "data", "pipeline", "prefill context")
NOT_FOUND = 404


@dataclass(frozen=True)
class Setup:
    """The settings of a running engine."""

    version: str
    sizes: tuple[int, ...]  # of its parallelism, in the order of `Seat`, as far as known
    quantizes: bool  # whether the engine itself may quantize weights
    layout: tuple[tuple[str, str], ...]  # settings that decide how it keeps weights
    dequantizes: bool = False  # whether the checksum of a weight includes its scale
    digest: Digest | None = None  # if not that of the program's own checker


@dataclass(frozen=True)
class EngineState:
    """The weight version of an engine, or None if unknown, and the checksums of each rank by parameter."""

    version: str | None
    ranks: Mapping[Seat, Mapping[str, str]]


def rank_label(engine: str, seat: Seat) -> str:
    """An engine and one of its ranks in each kind of parallelism that it has."""
    places = zip(_PLACES, seat[::2], seat[1::2], strict=False)
    return ", ".join([engine, *(f"{name} parallel rank {at}" for name, at, size in places if size > 1)])


@dataclass(frozen=True)
class JsonServer:
    """A server that answers in JSON. `headers` are sent with every request; `timeout` is in seconds."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 300.0

    def ask(self, path: str, body: Mapping[str, Any] | None = None, *, may_lack: bool = False) -> dict[str, Any] | None:
        """The answer to a request, or None if `may_lack` and the server does not know this path."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self.headers}
        request = Request(f"{self.url}/{path}", data, headers)  # noqa: S310 - the caller's own address
        try:
            with waiting(f"{self.url}/{path}"), urlopen(request, timeout=self.timeout) as answer:  # noqa: S310
                content = json.loads(answer.read())
        except HTTPError as error:
            if may_lack and error.code == NOT_FOUND:
                return None
            message = one_line(error.read().decode(errors="replace"))[:300]
            raise CkptkitError(f"{self.url}/{path}: HTTP {error.code}: {message}", "see the engine's log") from error
        except (OSError, HTTPException, ValueError) as error:
            hint = "check that the engine is running and can be reached from this host"
            raise CkptkitError(f"{self.url}/{path}: {words_of(error)}", hint) from error
        if not isinstance(content, dict):
            raise CkptkitError(f"{self.url}/{path} answered no JSON object", "pass the address of an engine")
        return content

    def require(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer to a request. Raises CkptkitError without an answer."""
        answer = self.ask(path, body)
        assert answer is not None
        return answer
