"""What SGLang's releases want around a weight update, told by what an engine can do and not by its version.

0.5.16 takes `update_weights_from_tensor` at any time, and loads repacked INT4 experts only between the loaders of
`quant.online.sglang_reload`. 0.5.23 takes it within a session alone: `begin_weight_update` undoes repacking,
`end_weight_update` repacks again, in the models that a selector names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from verify.witnesses.live.server import Refused
from verify.witnesses.sglang.live.readback import POISON, RECORD

BEGIN, END = "quant.online.sglang_reload.begin", "quant.online.sglang_reload.end"
LOADERS = [BEGIN, END, RECORD, POISON]  # what an engine is started with as `custom_weight_loader`
Send = Callable[[Sequence[Any], str | None], None]


def granted(answer: Sequence[Any]) -> None:
    """Raises Refused unless SGLang's answer to a request says that it was done."""
    success, message = answer[:2]
    if not success:
        raise Refused(str(message))


def has_sessions(engine: Any) -> bool:
    """Whether this engine takes weights within sessions only. It then also repacks by itself, also from disk."""
    return hasattr(engine, "begin_weight_update")


@contextmanager
def loading(engine: Any, send: Send, packed: bool) -> Iterator[None]:
    """Within this the whole checkpoint is sent by tensor. `packed`: the engine holds repacked INT4 layers.

    An exception leaves a session open: what the engine holds then is not known, and nothing more is asked of it.
    """
    if has_sessions(engine):
        with _session(engine, "all"):
            yield
        return
    if packed:
        send([], BEGIN)
    yield
    if packed:
        send([], END)


@contextmanager
def looking(engine: Any) -> Iterator[None]:
    """Within this a custom loader looks at weights, or fills them, and no layer of the model is repacked.

    The end of a session repacks whatever its selector names, and a second repacking destroys the weights. So only the
    draft model is named: where there is one, it must not be quantized.
    """
    if not has_sessions(engine):
        yield
        return
    with _session(engine, "draft"):
        yield


@contextmanager
def _session(engine: Any, selector: str) -> Iterator[None]:
    granted(engine.begin_weight_update(selector=selector))
    yield
    granted(engine.end_weight_update())
