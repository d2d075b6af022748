"""CK107: the dtypes of the stored weights, by headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from ckptkit.converters.foreign import refuse_foreign
from ckptkit.core.dtypes import COMPUTED, ITEMSIZE
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.side_files import main_dtype
from ckptkit.formats.torch_save.records import Dtype
from ckptkit.quant.formats.part_names import G_IDX, PACKED, SHAPE, ZERO_POINT
from ckptkit.verify.checks.headers.files import file_of_tensor, names_of
from ckptkit.verify.checks.quantization.quantization_config import undeclared_of
from ckptkit.verify.core.check import Issue, Subject, Tally, check
from ckptkit.verify.evidence.expected import (
    Expected,
    expected_of,
    has_floats,
    is_of_no_family,
    is_quantized,
    refuse_stated,
    usable_config,
)
from ckptkit.verify.evidence.floats.stored import parts_in_floats
from ckptkit.verify.evidence.packed import int4_format_of

_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8")
# Float32 state of linear attention and Mamba mixers that releases store in bfloat16 (Qwen3-Next, Qwen3.5's dt_bias,
# Nemotron 3).
_ROUNDED_BY_RELEASES = (".A_log", ".dt_bias", ".mixer.D", ".mamba.D")
_INTEGER_PARTS = (PACKED, SHAPE, ZERO_POINT, G_IDX, ".k_zero_point", ".v_zero_point")  # the last two of a cache
_INDICES = ("int64", "int32")


@check("CK107", explained_by=("CK203",))
def same_dtypes(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Each kind of tensor has one compute dtype in all layers, the one in config.json.

    fp32 state in a smaller dtype is a warning; CK203 compares it with a source.
    """
    specs = names_of(subject)
    if subject.is_hf:
        refuse_foreign(specs, subject.path)
        refuse_stated(subject)
    config = usable_config(subject)
    expected = expected_of(subject) or Expected({})
    of_no_family = is_of_no_family(subject)
    quantized = config is not None and is_quantized(config)
    may_have_codes = quantized and (int4_format_of(config or {}) is None or has_floats(config or {}))
    codes = parts_in_floats(subject)
    for names in subject.kinds:
        tally.compared()
        usual, count = Counter(specs[name].dtype for name in names).most_common(1)[0]
        # CK302 and CK306 judge layers that FP8 and the like leave out.
        plain = [name for name in names if name not in codes] if count < len(names) else []
        most, _ = Counter(specs[name].dtype for name in plain or names[:1]).most_common(1)[0]
        if odd := [name for name in plain if specs[name].dtype != most]:
            others, _ = Counter(specs[name].dtype for name in names if name not in odd).most_common(1)[0]
            expected_dtype, file = f"{others}, as in the other layers", file_of_tensor(subject, odd[0])
            yield Issue(expected_dtype, specs[odd[0]].dtype, names=odd, file=file)
        file = file_of_tensor(subject, names[0])
        if names[0] in expected.fp32 and ITEMSIZE[usual] < 4 and not names[0].endswith(_ROUNDED_BY_RELEASES):
            hint = "compare with the release: `ckptkit verify --source RELEASE` counts the values that were lost"
            yield Issue("float32", usual, hint, names=names, file=file, severity="warning")
        # A norm that Megatron stores less one is written in the next wider dtype, to lose nothing.
        # A norm that Megatron holds less one is written in the next wider dtype, so that nothing is lost in that.
        upcast = usual == "float64" and names[0] in expected.upcast
        if names[0] in expected.indices:
            if usual not in _INDICES:
                hint = "take the table from the release: a smaller dtype, or a float, gives other numbers"
                yield Issue("int64", usual, hint, names=names, file=file)
            continue
        if (
            usual not in COMPUTED
            and not (of_no_family and usual in _INDICES)  # CK541 compares with the class
            and not upcast
            and not names[0].endswith(_INTEGER_PARTS)
            and names[0] not in undeclared_of(subject)  # CK104 reports these
            and not (usual in _EIGHT_BITS and may_have_codes)
        ):
            yield Issue("bfloat16, float16 or float32", usual, names=names, file=file)
    yield from _config_dtype(subject, specs, config)


def _config_dtype(
    subject: Subject, specs: Mapping[str, TensorSpec], config: Mapping[str, Any] | None
) -> Iterator[Issue]:
    """The dtype in which an engine or Megatron allocates the model, against that of most weights."""
    stored = main_dtype(specs)
    if stored is None:
        return
    if subject.is_megatron:
        with suppress(CkptkitError):  # CK111 reports that the arguments cannot be read
            dtype = subject.megatron_files.args.get("params_dtype")
            if isinstance(dtype, Dtype) and dtype.name != stored:  # by --bf16 or --fp16
                expected, where = f"params_dtype {stored}, as most weights are", subject.megatron_files.args_file
                hint = "Megatron casts all weights to the dtype of the launch: check --bf16 and --fp16"
                yield Issue(expected, f"params_dtype {dtype.name}", hint, file=where, severity="warning")
        return
    for key in ("dtype", "torch_dtype"):
        dtype = (config or {}).get(key)
        if dtype is not None and str(dtype).removeprefix("torch.") not in (stored, "auto"):
            hint = f"set {key} to the dtype of the weights: loaders cast all weights to it"
            expected = f"{key} {stored}, as most weights are"
            yield Issue(expected, f"{key} {dtype}", hint, file="config.json", severity="warning")
