"""Quantizes the weights of a trainer while it streams them to SGLang: BF16 tensors in, buckets for `load_weights` out.

Before it sends anything, it refuses models that SGLang cannot update. The bytes are those of `ckptkit quantize`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import summarize
from ckptkit.quant.formats.scheme import Grid, read_scheme
from ckptkit.quant.online.form import Form, Fp8Form, Int4Form, fp8_form, quantize_bucket, refuse_nvfp4
from ckptkit.quant.online.served import served, served_in_fp8

if TYPE_CHECKING:
    from ckptkit.quant.online.cuda import BucketPlan

# Names and tensors for one call of load_weights. Parts of a packed weight come in the order packed, scale, shape.
Bucket = Sequence[tuple[str, Tensor]]
Named = Iterable[tuple[str, Tensor]]

_PLANS = 1024  # plans kept, one a bucket


class OnlineQuantizer:
    """Quantizes a model's tensors for an engine in INT4, block FP8 or MXFP8. Every update is a `Session`.

    `config`: the HF config that the engine serves, with `quantization_config`.
    `reference`: the checkpoint that the engine serves, its directory (an index is enough) or its tensor names; None,
    only for INT4, if the model's classes decide, as for `ckptkit quantize`.
    `grid`: the grid used in training, required if ckptkit did not write the config, which then does not name it.
    `waiting_bytes`: the most bytes of a layer's expert weights to collect before sending them; None: all of them.

    Raises CkptkitError for weights that SGLang cannot update. INT4: Linear layers, asymmetric scales, a partly packed
    layer, several config groups, or a config that contradicts the reference. FP8: other blocks than 128 x 128 (1 x 32
    of MXFP8), and activations with stored scales. NVFP4.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        reference: str | Path | Iterable[str] | None = None,
        *,
        grid: Grid | None = None,
        waiting_bytes: int | None = None,
    ) -> None:
        self.form: Form
        if form := fp8_form(config):
            if grid:
                raise CkptkitError("`grid` is for INT4, but the engine serves FP8", "remove `grid`")
            self.form, self.served = form, served_in_fp8(reference)
        else:
            refuse_nvfp4(config)
            scheme = read_scheme(config)
            scheme = replace(scheme, grid=grid) if grid else scheme
            self.form, self.served = Int4Form(scheme), served(config, scheme, reference)
        self.waiting_bytes = waiting_bytes
        self._plans: dict[tuple[int, str], BucketPlan] = {}

    def begin(self) -> Session:
        """Starts an update of all weights."""
        return Session(self)

    def stream(self, named: Named) -> Iterator[Bucket]:
        """Runs a complete update and yields each bucket once it is full. Raises CkptkitError as `Session` does."""
        session = self.begin()
        for pair in named:
            yield from session.add([pair])
        yield from session.finish()

    def quantize(self, named: Named) -> Bucket:
        """Quantizes these tensors at once, without a session and without a check for missing ones.

        For many matrices on a GPU this only starts the work on the current stream and returns a sequence, not a list.
        Its first access waits for the GPU and checks that weights are finite; do not change the weights before that.

        Raises CkptkitError, naming the tensor, for a name that is not in the checkpoint, a tensor that cannot be
        quantized, or weights that are not finite.
        """
        pairs = list(named)
        if not pairs:
            return []
        key = (len(pairs), pairs[0][0])
        if (plan := self._plans.get(key)) and (bucket := plan.quantize(pairs)) is not None:
            return bucket
        names = [self.served.name(name, tensor) for name, tensor in pairs]
        if plan := self._plan(pairs, names):
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[key] = plan
            if (bucket := plan.quantize(pairs)) is not None:
                return bucket
        renamed = [(name, tensor) for name, (_, tensor) in zip(names, pairs, strict=True)]
        return quantize_bucket(self.form, renamed, self.served.packed)

    def _plan(self, pairs: Sequence[tuple[str, Tensor]], names: Sequence[str]) -> BucketPlan | None:
        if not any(tensor.is_cuda for _, tensor in pairs):
            return None
        # Imported here because it needs Triton, which comes with CUDA builds of torch.
        from ckptkit.quant.online.cuda import plan_bucket

        return plan_bucket(pairs, names, self.served.packed, self.form)


class Session:
    """Quantizes one update of all weights: `add` in any order, send the returned buckets, then `finish`.

    SGLang discards INT4 experts before an update (`ckptkit.quant.online.sglang_reload`): `finish` raises if one is
    missing. A tensor may wait for the rest of its bucket: do not change it before.
    """

    def __init__(self, quantizer: OnlineQuantizer) -> None:
        self._quantizer, self._served, self._limit = quantizer, quantizer.served, quantizer.waiting_bytes
        self._waiting: dict[str, list[tuple[str, Tensor]]] = {}
        self._left = dict(quantizer.served.sizes)
        self._bytes = dict.fromkeys(quantizer.served.sizes, 0)
        self._delivered: set[str] = set()
        self._open = True

    @property
    def delivered(self) -> frozenset[str]:
        """Names in the checkpoint of all parameters added so far."""
        return frozenset(self._delivered)

    def add(self, named: Named) -> list[Bucket]:
        """Adds tensors, returns full buckets. Raises CkptkitError for unknown or repeated names, or after `finish`."""
        if not self._open:
            raise CkptkitError("this update is already finished", "begin a new update")
        touched = dict.fromkeys(self._collect(name, tensor) for name, tensor in named)
        limit = self._limit
        full = {key for key in touched if limit is not None and self._bytes[key] > limit and self._may_be_cut(key)}
        return [self._bucket(key) for key in touched if self._left[key] == 0 or key in full]

    def finish(self, elsewhere: Iterable[str] = ()) -> list[Bucket]:
        """Ends the update and returns the buckets still waiting for experts that other ranks send.

        `elsewhere`: the `delivered` names of those ranks. Raises CkptkitError naming every packed weight that no rank
        sent, or every tensor that SGLang joins with one that was not sent.
        """
        self._open = False
        if not isinstance(self._quantizer.form, Fp8Form):
            check_complete(self._served.packed, self._delivered, elsewhere)
        partial = [name for key, bucket in self._waiting.items() for name, _ in bucket if not self._may_be_cut(key)]
        if partial:
            hint = "send q_a_proj and kv_a_proj_with_mqa, q, k and v, gate and up in one update"
            raise CkptkitError(f"the update lacks a tensor that SGLang fuses with {summarize(sorted(partial))}", hint)
        return [self._bucket(key) for key in list(self._waiting)]

    def _collect(self, name: str, tensor: Tensor) -> str:
        known = self._served.name(name, tensor)
        if known in self._delivered:
            raise CkptkitError(f"{name} was sent twice in one update", "begin a new update for every set of weights")
        self._delivered.add(known)
        key = self._served.bucket.get(known, known)
        self._left[key] = self._left.get(key, 1) - 1
        self._bytes[key] = self._bytes.get(key, 0) + tensor.nbytes
        self._waiting.setdefault(key, []).append((known, tensor))
        return key

    def _may_be_cut(self, key: str) -> bool:
        """Whether a bucket may be sent in parts: experts in INT4. SGLang joins the tensors of other buckets."""
        return not isinstance(self._quantizer.form, Fp8Form) and self._waiting[key][0][0] in self._served.packed

    def _bucket(self, key: str) -> Bucket:
        self._bytes[key] = 0
        return self._quantizer.quantize(self._waiting.pop(key))


def check_complete(packed: frozenset[str], delivered: Iterable[str], elsewhere: Iterable[str] = ()) -> None:
    """Raises CkptkitError naming the packed weights that an update left out."""
    if missing := sorted(packed.difference(delivered, elsewhere)):
        message = f"the update lacks {len(missing)} packed weight(s), which SGLang has already discarded: "
        hint = "send every expert of every layer in each update, and repeat the update before anything is generated"
        raise CkptkitError(message + summarize(missing), hint)
