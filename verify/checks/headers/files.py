"""CK101 to CK103, CK105 to CK108, CK110: headers, JSON files and file names. Every fault is reported."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptkit.converters.foreign import refuse_foreign
from ckptkit.core.dtypes import COMPUTED, ITEMSIZE
from ckptkit.core.errors import CkptkitError, UnknownModelError, UnsupportedError
from ckptkit.core.specs import TensorSpec, ranges
from ckptkit.formats.detect import other_weights, refuse_other_format
from ckptkit.formats.hf.reader import INDEX, read_config
from ckptkit.formats.hf.shard import Fault, Shard
from ckptkit.formats.hf.side_files import is_read, main_dtype
from ckptkit.formats.torch_save.records import Dtype
from ckptkit.quant.formats.part_names import G_IDX, PACKED, SHAPE, ZERO_POINT
from ckptkit.storage.links import fetch_again, format_links
from ckptkit.verify.checks.quantization.quantization_config import undeclared_of
from ckptkit.verify.core.check import CannotCheck, Issue, NotApplicable, Subject, check, only_if, warning_if
from ckptkit.verify.core.report import CheckResult
from ckptkit.verify.evidence.expected import (
    Expected,
    config_of,
    config_or_none,
    expected_of,
    has_floats,
    has_own_class,
    is_of_no_family,
    is_quantized,
    refuse_stated,
    require_expected,
    spelling_of,
)
from ckptkit.verify.evidence.floats.stored import parts_in_floats
from ckptkit.verify.evidence.folding import by_key, group_by_pattern
from ckptkit.verify.evidence.packed import int4_format_of

_NUMBERED = re.compile(r"(.+?)-?(\d+)-of-(\d+)\.safetensors")
# Files of peft, and parts of tensor names from peft, slime's trainer and megatron-core's adapters.
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_BELOW = "lora_adapter"
_ADAPTER_NAMES = (
    *("lora_A", "lora_B", "lora_embedding", "lora_magnitude"),
    *(".adapter.linear_in.", ".adapter.linear_out.", ".adapter.adapter_"),
)
_WRAPPER = "base_model.model."
_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8")
# Float32 state of linear attention and Mamba mixers that releases store in bfloat16 (Qwen3-Next, Qwen3.5's dt_bias,
# Nemotron 3).
_ROUNDED_BY_RELEASES = (".A_log", ".dt_bias", ".mixer.D", ".mamba.D")
_INTEGER_PARTS = (PACKED, SHAPE, ZERO_POINT, G_IDX, ".k_zero_point", ".v_zero_point")  # the last two of a cache
_INDICES = ("int64", "int32")

only_hf = only_if(lambda subject: subject.kind == "hf", "a Megatron checkpoint has no safetensors files")


def names_of(subject: Subject, listed: bool = False) -> Mapping[str, TensorSpec]:
    """Every tensor in headers or `.metadata`, or else, if `listed`, in the index. Raises CannotCheck without any."""
    if subject.kind == "megatron":
        require_metadata(subject)
        if not subject.specs:
            raise CannotCheck("not run because there are no weights", "CK111")
    else:
        require_weights(subject)
        if not subject.specs and not (listed and subject.hf_files.unknown):
            raise CannotCheck("not run because no header names a tensor", "CK102")
    return subject.specs


def require_weights(subject: Subject) -> None:
    """Raises CannotCheck if an HF directory has no safetensors file and lists none, which CK103 reports."""
    refuse_other_format(subject.path)
    if not subject.hf_files.loader_files:
        raise CannotCheck("not run because there are no weights", "CK103")


def require_metadata(subject: Subject) -> None:
    """Raises CannotCheck if the `.metadata` of a Megatron checkpoint cannot be read, which CK111 reports."""
    if not subject.megatron_files.readable:
        raise CannotCheck("not run because .metadata cannot be read", "CK111")


@check("CK101", gate=True)
def config_usable(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The config is JSON, of a supported family, and its sizes fit together. An unknown model is not judged."""
    if subject.kind == "megatron":
        require_metadata(subject)
    elif "config.json" in subject.hf_files.dangling:
        raise CannotCheck("not run because config.json is a link without a target", "CK102")
    try:
        config_of(subject)
        result.compared()
    except CkptkitError as error:
        # An unknown model may be right, and so may its launch.
        is_unknown = isinstance(error, UnknownModelError) and subject.arguments is None
        is_wrong = is_unknown and not has_own_class(read_config(subject.config_root))
        if isinstance(error, UnsupportedError) and not is_wrong:
            raise
        problem, file = error.message.removeprefix("config.json: "), subject.config_root / "config.json"
        yield Issue("the config of a supported model", problem, error.hint or "", file=file)


@check("CK102", gate=True, applies_to=only_hf)
def shards_whole(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every file of the index exists, its header fits its size and offsets, and links have targets."""
    files = subject.hf_files
    if links := files.dangling:  # a warning if loaders read none of them
        severity = warning_if(not any(is_read(Path(name)) for name in links))
        actual, hint = format_links(links), fetch_again(files.root)
        file = next(iter(links)) if len(links) == 1 else ""
        yield Issue("links to existing files", actual, hint, file=file, severity=severity, count=len(links))
    require_weights(subject)
    if gone := [file for file in files.missing if file not in files.dangling]:
        yield _for_files(gone, "the file that the index names", "missing", "copy or download the file")
    by_fault: dict[tuple[str, str], list[str]] = defaultdict(list)
    for file, shard in files.shards.items():
        result.compared(len(shard.specs) or 1)
        for fault in shard.faults:
            if fault.name is None:
                by_fault[fault.expected, fault.actual].append(file)
        yield from _entries(shard)
        if not shard.faults and not files.specs:
            by_fault["a header with tensors", "the header has no tensor"].append(file)
    for (expected, actual), damaged in by_fault.items():
        yield _for_files(damaged, expected, actual)


def _entries(shard: Shard) -> Iterator[Issue]:
    """Faulty entries of one header, one issue for each kind of fault."""
    kinds: dict[tuple[str, str], list[Fault]] = defaultdict(list)
    for fault in shard.faults:
        if fault.name is not None:
            kinds[fault.hint or "", re.sub(r"\d+", "#", fault.expected.partition(" for ")[0])].append(fault)
    for (hint, _), faults in kinds.items():
        first, names = faults[0], list(dict.fromkeys(str(fault.name) for fault in faults))
        more = f"; {len(faults) - 1} more entries of the header are wrong too" if faults[1:] else ""
        yield Issue(first.expected, first.actual + more, hint, names=names, file=shard.path, as_one=True)


def _for_files(files: Sequence[str], expected: str, actual: str, hint: str = "") -> Issue:
    """One issue for one or several files with the same fault."""
    if len(files) == 1:
        return Issue(expected, actual, hint, file=files[0])
    return Issue(expected, f"{files[0]} and {len(files) - 1} more: {actual}", hint, count=len(files))


@check("CK103", gate=True, applies_to=only_hf)
def index_sound(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The index is JSON with a weight_map, and every entry is a file in this directory."""
    if INDEX in subject.hf_files.dangling:
        raise CannotCheck("not run because the index is a link without a target", "CK102")
    refuse_other_format(subject.path)
    result.compared()
    hint = ""
    if not (files := subject.hf_files).loader_files and files.index is None:
        # verl keeps config and tokenizer in huggingface/, next to the weights.
        root = files.root.parent if files.root.name == "huggingface" and not other_weights(files.root) else files.root
        hint = other_weights(root) or "download the weights as safetensors"
    for issue in files.index_issues:
        yield replace(issue, hint=hint, file=INDEX)


@check("CK105", gate=True)
def same_shapes(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every shape equals the config's; only Megatron's vocabulary may have more rows, as padding."""
    specs = names_of(subject)
    expected = require_expected(subject)
    if (spelling := spelling_of(subject)) and not spelling.renamed_on_load:
        raise CannotCheck(f"not run because names of layers begin with another prefix, {spelling.found}", "CK104")
    wrong: dict[tuple[str, str], list[str]] = defaultdict(list)
    known = sum(map(specs.__contains__, expected.shapes))
    if not known:
        raise CannotCheck("not run because no tensor has a name that the model of config.json expects", "CK104")
    result.compared(known)
    for name, shape in expected.shapes.items():
        if shape is None or name not in specs or (actual := specs[name].shape) == shape:
            continue
        if not (name in expected.vocab and actual[:1] > shape[:1] and actual[1:] == shape[1:]):
            wrong[f"shape {list(shape)}", f"shape {list(actual)}"].append(name)
    for (promised, stored), group in wrong.items():
        for names in group_by_pattern(group):
            yield Issue(promised, stored, names=names, file=file_of_tensor(subject, names[0]))


def file_of_tensor(subject: Subject, name: str) -> str:
    """The file or directory that holds a tensor."""
    if subject.kind == "megatron":
        return str(subject.megatron_files.weights)
    return str(next(shard.path for shard in subject.hf_files.shards.values() if name in shard.specs))


def _needs_index(subject: Subject) -> None:
    only_hf(subject)
    if subject.hf_files.index is None and not subject.hf_files.index_issues:
        raise NotApplicable("a single file needs no index")


@check("CK106", applies_to=_needs_index)
def total_size_true(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The index's `metadata.total_size` against the headers."""
    files = subject.hf_files
    if not files.index:
        raise CannotCheck("the index is missing or cannot be used", "CK103")
    if files.unknown:
        raise CannotCheck("not run because some shards cannot be read", "CK102")
    result.compared(len(files.specs))
    if files.index.keys() != files.specs.keys():
        raise CannotCheck("not run because index and shards name different tensors", "CK104")
    total = sum(one.nbytes for one in (files.specs if files.duplicates else files.shards).values())
    if files.total_size != total:
        rows = sum(spec.shape[0] for spec in files.specs.values() if spec.shape)
        is_rows = ", which is the number of rows, not of bytes" if files.total_size == rows else ""
        actual = "total_size is missing" if files.total_size is None else f"total_size = {files.total_size}{is_rows}"
        yield Issue(f"total_size = {total}", actual, file=INDEX, severity="warning")


@check("CK108", applies_to=only_hf)
def shards_numbered(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The shards have the numbers 1 to N, or from 0, each once and with one N; and no shard was only renamed."""
    files = subject.hf_files
    if not files.loader_files:
        raise CannotCheck("the checkpoint has no shards", "CK103")
    result.compared(len(files.loader_files))
    series: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for match in filter(None, map(_NUMBERED.fullmatch, files.loader_files)):
        series[match[1]][int(match[3])].append(int(match[2]))
    for stem, totals in series.items():
        yield from _series(stem, totals)
    if not files.missing or not files.orphans:
        return
    # Files that the index does not name, with exactly the tensors of a file that is missing.
    by_names = {frozenset(files.scan(name).specs): name for name in files.orphans}
    homes = by_key((file, name) for name, file in (files.index or {}).items())
    found = {file: by_names.get(frozenset(homes[file])) for file in files.missing if file in homes}
    if renamed := [(file, other) for file, other in found.items() if other]:
        (missing, other), more = renamed[0], len(renamed) - 1
        hint = f"rename {other} to {missing}" + (f", and {more} more files in the same way" if more else "")
        actual = f"missing; its tensors are in {other}, which the index does not name"
        yield Issue(f"the shard {missing}", actual, hint, file=missing, count=len(renamed))


def _series(stem: str, totals: Mapping[int, list[int]]) -> Iterator[Issue]:
    if len(totals) > 1:
        actual = " and ".join(f"{len(numbers)} names with of-{total}" for total, numbers in sorted(totals.items()))
        hint = "keep the files of one save with their index: files of two saves are mixed"
        yield Issue(f"the same total in all names {stem}-*-of-*", actual, hint)
        return
    ((total, numbers),) = totals.items()
    # gpt-oss counts from 0 to N, slime from 0 to N - 1, other programs from 1 to N.
    if missing := set(range(1, total + (0 not in numbers))) - set(numbers):
        hint = "copy or download the shard; if the release lacks it too, no tensor is lost"
        yield Issue(f"{total} shards {stem}-*-of-{total}", f"number {ranges(missing)} is missing", hint)
    strange = [number for number in numbers if number > total]
    if strange or len(set(numbers)) < len(numbers):
        twice = sorted({number for number in numbers if numbers.count(number) > 1})
        actual = f"number {ranges(strange)} is above {total}" if strange else f"number {ranges(twice)} is repeated"
        yield Issue(f"different shard numbers up to {total}", actual, "keep the files of one save")


@check("CK110")
def adapters_merged(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """There are no adapter files next to the weights, and no adapter names among the tensors."""
    names = names_of(subject)
    result.compared(len(_ADAPTER_FILES) + len(names))
    root = subject.path if subject.kind == "hf" else subject.megatron_files.weights
    for file in _ADAPTER_FILES:
        if (root / file).exists():
            yield Issue("merged weights without adapter files", f"{file} is next to the weights", file=root / file)
    if (root / _BELOW / _ADAPTER_FILES[0]).exists():
        adapter = f"{_BELOW}/ contains an adapter, and verl's model merger does not merge it into the weights"
        result.note(f"{adapter}: check them with `ckptkit verify {root} --source BASE --adapter {root / _BELOW}`")
    every = dict.fromkeys([*names, *(subject.hf_files.index or {} if subject.kind == "hf" else {})])
    # CK104 reports a wrapper's prefix of all names.
    parts = _ADAPTER_NAMES if all(name.startswith(_WRAPPER) for name in every) else (*_ADAPTER_NAMES, _WRAPPER)
    text = "\n".join(every)  # one search in all of them is fast, and there are hundreds of thousands
    odd = [name for name in every if any(part in name for part in parts)] if any(map(text.__contains__, parts)) else []
    yield Issue("tensors of the model only", "a tensor of an unmerged adapter", names=odd, file=root, as_one=True)


@check("CK107", explained_by=("CK203",))
def same_dtypes(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Each kind of tensor has one dtype, as in config.json; fp32 in a smaller dtype is a warning (see CK203)."""
    specs = names_of(subject)
    if subject.kind == "hf":
        refuse_foreign(specs, subject.path)
        refuse_stated(subject)
    config, expected = config_or_none(subject) or {}, expected_of(subject) or Expected({})
    may_have_codes = is_quantized(config) and (int4_format_of(config) is None or has_floats(config))
    codes = parts_in_floats(subject)
    for names in subject.kinds:
        result.compared()
        usual, count = Counter(specs[name].dtype for name in names).most_common(1)[0]
        # CK302 and CK306 judge layers that FP8 and the like leave out.
        plain = [name for name in names if name not in codes] if count < len(names) else []
        most, _ = Counter(specs[name].dtype for name in plain or names[:1]).most_common(1)[0]
        if odd := [name for name in plain if specs[name].dtype != most]:
            others, _ = Counter(specs[name].dtype for name in names if name not in odd).most_common(1)[0]
            expected_dtype, file = f"{others}, as in the other layers", file_of_tensor(subject, odd[0])
            yield Issue(expected_dtype, specs[odd[0]].dtype, names=odd, file=file)
        if names[0] in expected.fp32 and ITEMSIZE[usual] < 4 and not names[0].endswith(_ROUNDED_BY_RELEASES):
            hint = "compare with the release: `ckptkit verify --source RELEASE` counts the lost values"
            yield Issue("float32", usual, hint, names=names, file=file_of_tensor(subject, names[0]), severity="warning")
        # A norm that Megatron stores less one is written in the next wider dtype, to lose nothing.
        upcast = usual == "float64" and names[0] in expected.upcast
        if names[0] in expected.indices:
            if usual not in _INDICES:
                hint = "take the table from the release: a float or a smaller integer dtype changes its numbers"
                yield Issue("int64", usual, hint, names=names, file=file_of_tensor(subject, names[0]))
            continue
        if (
            usual not in COMPUTED
            and not (usual in _INDICES and is_of_no_family(subject))  # CK541 compares with the class
            and not upcast
            and not names[0].endswith(_INTEGER_PARTS)
            and names[0] not in undeclared_of(subject)  # CK104 reports these
            and not (usual in _EIGHT_BITS and may_have_codes)
        ):
            yield Issue("bfloat16, float16 or float32", usual, names=names, file=file_of_tensor(subject, names[0]))
    if (main := main_dtype(specs)) is not None:
        yield from _config_dtype(subject, main, config)


def _config_dtype(subject: Subject, stored: str, config: Mapping[str, Any]) -> Iterator[Issue]:
    """The dtype in which an engine or Megatron allocates the model, against that of most weights."""
    if subject.kind == "megatron":
        with suppress(CkptkitError):  # CK111 reports that the arguments cannot be read
            dtype = subject.megatron_files.args.get("params_dtype")
            if isinstance(dtype, Dtype) and dtype.name != stored:  # by --bf16 or --fp16
                expected, where = f"params_dtype {stored}, as most weights are", subject.megatron_files.args_file
                hint = "Megatron casts all weights to the dtype of the launch: check --bf16 and --fp16"
                yield Issue(expected, f"params_dtype {dtype.name}", hint, file=where, severity="warning")
        return
    for key in ("dtype", "torch_dtype"):
        dtype = config.get(key)
        if dtype is not None and str(dtype).removeprefix("torch.") not in (stored, "auto"):
            hint = f"set {key} to the dtype of the weights: loaders cast all weights to it"
            expected = f"{key} {stored}, as most weights are"
            yield Issue(expected, f"{key} {dtype}", hint, file="config.json", severity="warning")
