"""Puts a `WeightSyncCheck` into the class that sends weights, without a change to the trainer's files."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.weight_sync.check import WeightSyncCheck
from ckptkit.verify.weight_sync.messages import job_rank

_CHECK = "_ckptkit_check"
_HINT = "use a trainer release of docs/jobs.md: this one sends weights in another way"


def watch_updates(
    updater: type,
    send: str,
    *,
    urls: Callable[[Any], Iterable[str | None]] | None = None,
    when: Callable[[Any], bool] | None = None,
    **options: Any,
) -> None:
    """Makes objects of the class `updater` check every Nth of their updates.

    `send` names its method with a list of (name, tensor) as first argument. After `update_weights` engines are asked.
    `urls` returns their addresses (default: `get_url` of the ray actors in `rollout_engines`), `when` whether this
    process checks (default: rank 0). `options` are those of `WeightSyncCheck`. Raises CkptkitError.
    """
    _require_unwatched(updater, "watch_updates")
    methods = (send, "update_weights")
    if missing := [name for name in methods if not callable(getattr(updater, name, None))]:
        raise CkptkitError(f"{updater.__name__} has no method {' and no method '.join(missing)}", _HINT)
    addresses, checks = urls or _of_ray_actors, when or (lambda _: job_rank() == 0)
    sending, updating = (getattr(updater, name) for name in methods)

    @functools.wraps(sending)
    def recorded(self: Any, pairs: Any, *args: Any, **more: Any) -> Any:
        if checks(self):
            if (check := vars(self).get(_CHECK)) is None:
                check = WeightSyncCheck(_without_none(addresses(self)), **options)
                setattr(self, _CHECK, check)
            for name, tensor in pairs:
                check.record(name, tensor)
        return sending(self, pairs, *args, **more)

    @functools.wraps(updating)
    def checked(self: Any, *args: Any, **more: Any) -> Any:
        check = vars(self).get(_CHECK)
        if check is not None and check.due:
            check.use(_without_none(addresses(self)))  # engines may have been restarted
        result = updating(self, *args, **more)
        if (check := vars(self).get(_CHECK)) is not None:  # the first update creates it
            check.after_update(self.weight_version)
        return result

    for name, method in (*zip(methods, (recorded, checked), strict=True), (_CHECK, None)):
        setattr(updater, name, method)


def watch_rollout(adapter: type, *, urls: Callable[[Any], Iterable[str]] | None = None, **options: Any) -> None:
    """Makes objects of the class `adapter`, such as verl's `ServerAdapter`, check every Nth of their updates.

    Its coroutine `update_weights` takes an iterable of (name, tensor). `urls` returns the addresses of engines, empty
    if this process does not check (default: that of `server_handle`, on `rollout_rank` 0). `options` are those of
    `WeightSyncCheck`, with vllm as default `program`. Raises CkptkitError.
    """
    _require_unwatched(adapter, "watch_rollout")
    if not asyncio.iscoroutinefunction(updating := getattr(adapter, "update_weights", None)):
        raise CkptkitError(f"{adapter.__name__} has no coroutine update_weights", _HINT)
    addresses = urls or _of_ray_server

    @functools.wraps(updating)
    async def checked(self: Any, weights: Any, *args: Any, **more: Any) -> Any:
        if not (engines := await asyncio.to_thread(lambda: list(addresses(self)))):
            return await updating(self, weights, *args, **more)
        check = vars(self).get(_CHECK) or WeightSyncCheck(engines, **{"program": "vllm", **options})
        setattr(self, _CHECK, check)
        if check.due:
            check.use(engines)  # they may have been restarted
        result = await updating(self, _recorded(check, weights), *args, **more)
        await asyncio.to_thread(check.after_update)
        return result

    adapter.update_weights = checked  # type: ignore[attr-defined]
    setattr(adapter, _CHECK, None)


def _require_unwatched(owner: type, function: str) -> None:
    if _CHECK in vars(owner):
        raise CkptkitError(f"{owner.__name__} is already watched", f"call {function} only once per process")


def _recorded(check: WeightSyncCheck, weights: Any) -> Iterator[Any] | AsyncIterator[Any]:
    def record() -> Iterator[Any]:
        for name, tensor in weights:
            check.record(name, tensor)
            yield name, tensor

    async def record_async() -> AsyncIterator[Any]:
        async for name, tensor in weights:
            check.record(name, tensor)
            yield name, tensor

    return record_async() if hasattr(weights, "__aiter__") else record()


def _of_ray_server(adapter: Any) -> Iterable[str]:
    if adapter.rollout_rank != 0:
        return []
    import ray

    adapter._ensure_server_handle()
    host, port = ray.get(adapter.server_handle.get_server_address.remote())
    return [f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"]


def _without_none(urls: Iterable[str | None]) -> list[str]:
    return [url for url in urls if url]  # an engine over several nodes has one address


def _of_ray_actors(updater: Any) -> Iterable[str | None]:
    import ray

    urls: list[str | None] = ray.get([engine.get_url.remote() for engine in updater.rollout_engines])
    return urls
