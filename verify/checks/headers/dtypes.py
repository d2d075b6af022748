"""CK107: the dtypes that weights are stored in, by headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
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
from ckptkit.verify.core.check import Tally, check
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.expected import (
    Expected,
    config_or_none,
    expected_of,
    has_floats,
    is_of_no_family,
    is_quantized,
    refuse_stated,
)
from ckptkit.verify.evidence.floats.stored import parts_in_floats
from ckptkit.verify.evidence.packed import int4_format_of

_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8")
# Float32 state of linear attention and of Mamba mixers that releases store in bfloat16 all the same (Qwen3-Next,
# Qwen3.5's dt_bias, Nemotron 3).
_ROUNDED_BY_RELEASES = (".A_log", ".dt_bias", ".mixer.D", ".mamba.D")
_INTEGER_PARTS = (PACKED, SHAPE, ZERO_POINT, G_IDX, ".k_zero_point", ".v_zero_point")  # the last two of a cache
_INDICES = ("int64", "int32")


@check("CK107", explained_by=("CK203",))
def same_dtypes(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """One dtype, that models compute in, for each kind of tensor over all layers; and the dtype that config.json says.

    A warning where fp32 state is stored smaller (CK203 compares with a source).
    """
    specs = names_of(subject)
    if subject.is_hf:
        refuse_foreign(specs, subject.path)
        refuse_stated(subject)
    config = config_or_none(subject)
    expected = expected_of(subject) or Expected({})
    fp32 = expected.fp32
    of_no_family = is_of_no_family(subject)
    quantized = config is not None and is_quantized(config)  # and not packed, or not only
    may_have_codes = quantized and (int4_format_of(config or {}) is None or has_floats(config or {}))
    codes = parts_in_floats(subject)
    for names in subject.kinds:
        tally.compared()
        usual, count = Counter(specs[name].dtype for name in names).most_common(1)[0]
        # Layers may be left out of FP8 and the like, which CK302 and CK306 judge.
        plain = [name for name in names if name not in codes] if count < len(names) else []
        most, _ = Counter(specs[name].dtype for name in plain or names[:1]).most_common(1)[0]
        if odd := [name for name in plain if specs[name].dtype != most]:
            others, _ = Counter(specs[name].dtype for name in names if name not in odd).most_common(1)[0]
            expected_dtype, file = f"{others}, as in the other layers", file_of_tensor(subject, odd[0])
            yield Issue(expected_dtype, specs[odd[0]].dtype, names=odd, file=file)
        if names[0] in fp32 and ITEMSIZE[usual] < 4 and not names[0].endswith(_ROUNDED_BY_RELEASES):
            hint = "compare with the release: `ckptkit verify --source RELEASE` counts the values that were lost"
            yield Issue("float32", usual, hint, names=names, file=file_of_tensor(subject, names[0]), severity="warning")
        # A norm that Megatron holds less one is written in the next wider dtype, so that nothing is lost in that.
        upcast = usual == "float64" and names[0] in expected.upcast
        if names[0] in expected.indices:
            if usual not in _INDICES:
                hint = "take the table from the release: a smaller dtype, or a float, gives other numbers"
                yield Issue("int64", usual, hint, names=names, file=file_of_tensor(subject, names[0]))
            continue
        if (
            usual not in COMPUTED
            and not (of_no_family and usual in _INDICES)  # CK541 asks whether the class has whole numbers there
            and not upcast
            and not names[0].endswith(_INTEGER_PARTS)
            and names[0] not in undeclared_of(subject)  # CK104 says so
            and not (usual in _EIGHT_BITS and may_have_codes)
        ):
            yield Issue("bfloat16, float16 or float32", usual, names=names, file=file_of_tensor(subject, names[0]))
    yield from _config_dtype(subject, specs, config)


def _config_dtype(
    subject: Subject, specs: Mapping[str, TensorSpec], config: Mapping[str, Any] | None
) -> Iterator[Issue]:
    """The dtype that an engine takes from config.json to allocate a model in, against the one most weights are in."""
    stored = main_dtype(specs)
    if stored is None:
        return
    if subject.is_megatron:
        try:
            stated = subject.megatron_files.args.get("params_dtype")
        except CkptkitError:
            return  # CK111 says why they cannot be read
        if isinstance(stated, Dtype) and stated.name != stored:  # by --bf16 or --fp16
            expected, where = f"params_dtype {stored}, as most weights are", subject.megatron_files.args_file
            hint = "Megatron casts all weights to the dtype of the launch: check --bf16 and --fp16"
            yield Issue(expected, f"params_dtype {stated.name}", hint, file=where, severity="warning")
        return
    if config is None:
        return
    for key in ("dtype", "torch_dtype"):
        stated = config.get(key)
        if stated is not None and str(stated).removeprefix("torch.") not in (stored, "auto"):
            hint = f"set {key} to the dtype of the weights: loaders cast all weights to it"
            expected = f"{key} {stored}, as most weights are"
            yield Issue(expected, f"{key} {stated}", hint, file="config.json", severity="warning")
