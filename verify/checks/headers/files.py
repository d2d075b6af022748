"""CK101 to CK103, CK105, CK106, CK108, CK110: headers, JSON files and their names; every problem is listed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.core.errors import CkptkitError, UnknownModelError, UnsupportedError
from ckptkit.core.specs import TensorSpec, ranges
from ckptkit.formats.detect import other_weights, refuse_other_format
from ckptkit.formats.hf.reader import INDEX, read_config
from ckptkit.formats.hf.shard import Fault, Shard
from ckptkit.formats.hf.side_files import is_read
from ckptkit.storage.links import fetch_again, format_links
from ckptkit.verify.core.check import Tally, check, where
from ckptkit.verify.core.issue import Issue, warning_if
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.expected import config_of, has_own_class, require_expected, spelling_of
from ckptkit.verify.evidence.files import HfFiles
from ckptkit.verify.evidence.folding import by_key, group_by_pattern

_NUMBER = re.compile(r"\d+")


only_hf = where(lambda subject: subject.is_hf, "a Megatron checkpoint has no safetensors files")


def names_of(subject: Subject, listed: bool = False) -> Mapping[str, TensorSpec]:
    """Every tensor that headers or `.metadata` name. Raises CannotCheck where there are none to read.

    `listed`: those that the index lists in files that cannot be read will do.
    """
    if subject.is_megatron:
        require_metadata(subject)
        if not subject.specs:
            raise CannotCheck("not run because there are no weights", "CK111")
    else:
        require_weights(subject)
        if not subject.specs and not (listed and subject.hf_files.unknown):
            raise CannotCheck("not run because no header names a tensor", "CK102")
    return subject.specs


def require_weights(subject: Subject) -> None:
    """Raises CannotCheck where an HF directory holds no safetensors file and names none, which CK103 reports.

    Raises UnsupportedError as `refuse_other_format`.
    """
    refuse_other_format(subject.path)
    if not subject.hf_files.wanted:
        raise CannotCheck("not run because there are no weights", "CK103")


def require_metadata(subject: Subject) -> None:
    """Raises CannotCheck where the `.metadata` of a Megatron checkpoint cannot be read, which CK111 reports."""
    if not subject.megatron_files.readable:
        raise CannotCheck("not run because .metadata cannot be read", "CK111")


@check("CK101", gate=True)
def config_usable(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The config is there, is JSON, is of a supported family, and its sizes make sense.

    A `model_type` that is not known, with a class that is not known either, is not judged.
    """
    if subject.is_megatron:
        require_metadata(subject)
    elif "config.json" in subject.hf_files.dangling:
        raise CannotCheck("not run because config.json is a link that leads nowhere", "CK102")
    try:
        config_of(subject)
        tally.compared()
    except CkptkitError as error:
        # A model that is not known here may be right, and so may its launch.
        wrong = (
            isinstance(error, UnknownModelError)
            and subject.arguments is None
            and not has_own_class(read_config(subject.config_root))
        )
        if isinstance(error, UnsupportedError) and not wrong:
            raise
        problem, file = error.message.removeprefix("config.json: "), subject.config_root / "config.json"
        yield Issue("the config of a supported model", problem, error.hint or "", file=file)


@check("CK102", gate=True, applies_to=only_hf)
def shards_whole(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every file of the index is there, and its size and offsets are what its own header says; links lead somewhere."""
    files = subject.hf_files
    if links := files.dangling:  # a warning where loaders read none of them
        where, severity = next(iter(links)), warning_if(not any(is_read(Path(name)) for name in links))
        actual, hint = format_links(links), fetch_again(files.root)
        file = where if len(links) == 1 else ""
        yield Issue("a target for every link", actual, hint, file=file, severity=severity, count=len(links))
    require_weights(subject)
    gone = [file for file in files.missing if file not in files.dangling]
    if gone:
        yield _together(gone, "the file that the index names", "missing", "copy or download it")
    whole: dict[tuple[str, str], list[str]] = defaultdict(list)
    for file, shard in files.shards.items():
        tally.compared(len(shard.specs) or 1)
        for fault in shard.faults:
            if fault.name is None:
                whole[fault.expected, fault.actual].append(file)
        yield from _entries(shard)
        if not shard.faults and not files.specs:
            whole["tensors", "none in its header"].append(file)
    for (expected, actual), found in whole.items():
        yield _together(found, expected, actual)


def _entries(shard: Shard) -> Iterator[Issue]:
    """What is wrong with entries of one header: one issue for all entries that are wrong in the same way."""
    kinds: dict[tuple[str, str], list[Fault]] = defaultdict(list)
    for fault in shard.faults:
        if fault.name is not None:
            kind = _NUMBER.sub("#", fault.expected.partition(" for ")[0])
            kinds[fault.hint or "", kind].append(fault)
    for (hint, _), faults in kinds.items():
        first, names = faults[0], list(dict.fromkeys(str(fault.name) for fault in faults))
        more = f"; {len(faults) - 1} more entries of its header are wrong too" if faults[1:] else ""
        yield Issue(first.expected, first.actual + more, hint, names=names, file=shard.path, together=True)


def _together(found: Sequence[str], expected: str, actual: str, hint: str = "") -> Issue:
    """What is wrong with one file, or with several in the same way."""
    if len(found) == 1:
        return Issue(expected, actual, hint, file=found[0])
    return Issue(expected, f"{found[0]} and {len(found) - 1} more: {actual}", hint, count=len(found))


@check("CK103", gate=True, applies_to=only_hf)
def index_sound(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The index is JSON with a weight_map, and every entry is a file of this directory."""
    if INDEX in subject.hf_files.dangling:
        raise CannotCheck("not run because the index is a link that leads nowhere", "CK102")
    refuse_other_format(subject.path)
    tally.compared()
    hint = ""
    if not (files := subject.hf_files).wanted and files.index is None:
        # verl keeps config and tokenizer in huggingface/, beside the weights.
        root = files.root.parent if files.root.name == "huggingface" and not other_weights(files.root) else files.root
        hint = other_weights(root) or "download its weights, as safetensors"
    for issue in files.index_issues:
        yield replace(issue, hint=hint, file=INDEX)


@check("CK105", gate=True)
def same_shapes(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every shape equals the config's; only Megatron's vocabulary may be padded with more rows."""
    specs = names_of(subject)
    expected = require_expected(subject)
    if (spelling := spelling_of(subject)) and not spelling.renamed_on_load:
        raise CannotCheck(f"not run because the layers are stored under {spelling.found}*", "CK104")
    wrong: dict[tuple[str, str], list[str]] = defaultdict(list)
    known = sum(map(specs.__contains__, expected.shapes))
    if not known:
        raise CannotCheck("not run because no tensor has a name that config.json promises", "CK104")
    tally.compared(known)
    for name, shape in expected.shapes.items():
        if shape is None or name not in specs or (actual := specs[name].shape) == shape:
            continue
        padded = name in expected.vocab and actual[:1] > shape[:1] and actual[1:] == shape[1:]
        if not padded:
            wrong[f"shape {list(shape)}", f"shape {list(actual)}"].append(name)
    for (want, found), group in wrong.items():
        for names in group_by_pattern(group):
            yield Issue(want, found, names=names, file=file_of_tensor(subject, names[0]))


def file_of_tensor(subject: Subject, name: str) -> str:
    """The file or directory that holds a tensor."""
    if subject.is_megatron:
        return str(subject.megatron_files.weights)
    found: list[Path] = [shard.path for shard in subject.hf_files.shards.values() if name in shard.specs]
    return str(found[0])


def _needs_index(subject: Subject) -> None:
    only_hf(subject)
    if subject.hf_files.index is None and not subject.hf_files.index_issues:
        raise NotApplicable("a single file needs no index")


@check("CK106", applies_to=_needs_index)
def total_size_true(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The index's `metadata.total_size` against the headers."""
    files = subject.hf_files
    if not files.index:
        raise CannotCheck("there is no usable index", "CK103")
    if files.unknown:
        raise CannotCheck("not run because some shards cannot be read", "CK102")
    tally.compared(len(files.specs))
    if files.index.keys() != files.specs.keys():
        raise CannotCheck("not run because index and shards name different tensors", "CK104")
    total = sum(one.nbytes for one in (files.specs if files.twice else files.shards).values())
    if files.total_size != total:
        rows = sum(spec.shape[0] for spec in files.specs.values() if spec.shape)
        is_rows = ", which is the number of rows" if files.total_size == rows else ""
        stated = "no total_size" if files.total_size is None else f"total_size {files.total_size}{is_rows}"
        yield Issue(f"total_size {total}", stated, file=INDEX, severity="warning")


_NUMBERED = re.compile(r"(.+?)-?(\d+)-of-(\d+)\.safetensors")
# Files of peft, and what peft, slime's trainer and megatron-core's adapters put into names of tensors.
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_BELOW = "lora_adapter"
_ADAPTER_NAMES = (
    *("lora_A", "lora_B", "lora_embedding", "lora_magnitude"),
    *(".adapter.linear_in.", ".adapter.linear_out.", ".adapter.adapter_"),
)
_WRAPPER = "base_model.model."


@check("CK108", applies_to=only_hf)
def shards_numbered(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The numbers 1 to N, or from 0, each once and with one N; and no shard that was only renamed."""
    files = subject.hf_files
    if not files.wanted:
        raise CannotCheck("there are no shards", "CK103")
    tally.compared(len(files.wanted))
    series: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for match in filter(None, map(_NUMBERED.fullmatch, files.wanted)):
        series[match[1]][int(match[3])].append(int(match[2]))
    for stem, totals in series.items():
        yield from _series(stem, totals)
    yield from _renamed(files)


def _series(stem: str, totals: Mapping[int, list[int]]) -> Iterator[Issue]:
    if len(totals) > 1:
        actual = " and ".join(f"{len(numbers)} of {total}" for total, numbers in sorted(totals.items()))
        hint = "files of two saves are mixed: keep those of one, with their index"
        yield Issue(f"the same number of shards in all names {stem}-*-of-*", actual, hint)
        return
    ((total, numbers),) = totals.items()
    # gpt-oss counts from 0 to N, slime from 0 to N - 1, everybody else from 1 to N.
    wanted = set(range(1, total)) | ({total} if 0 not in numbers else set())
    if missing := wanted - set(numbers):
        hint = "copy or download it; if the release really has none, its index lists no tensor that it could hold"
        yield Issue(f"{total} shards {stem}-*-of-{total}", f"number {ranges(missing)} is missing", hint)
    strange = [number for number in numbers if number > total]
    if strange or len(set(numbers)) < len(numbers):
        twice = sorted({number for number in numbers if numbers.count(number) > 1})
        actual = f"number {ranges(strange)} of {total}" if strange else f"number {ranges(twice)} more than once"
        yield Issue(f"numbers up to {total}, each once", actual, "keep the files of one save")


def _renamed(files: HfFiles) -> Iterator[Issue]:
    """Files that nothing names, and that hold just what the index expects in one that is not there."""
    if not files.missing or not files.orphans:
        return
    held = {frozenset(files.scan(name).specs): name for name in files.orphans}
    homes = by_key((file, name) for name, file in (files.index or {}).items())
    found = {file: held.get(frozenset(homes[file])) for file in files.missing if file in homes}
    renamed = [(file, other) for file, other in found.items() if other]
    if renamed:
        (missing, other), more = renamed[0], len(renamed) - 1
        actual, hint = f"its tensors lie in {other}, which the index does not name", f"rename {other} to {missing}"
        hint += f", and {more} more in the same way" if more else ""
        yield Issue(missing, actual, hint, file=missing, count=len(renamed))


@check("CK110")
def adapters_merged(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """No adapter files beside the weights, no adapter names among the tensors."""
    names = names_of(subject)
    tally.compared(len(_ADAPTER_FILES) + len(names))
    root = subject.path if subject.is_hf else subject.megatron_files.weights
    for file in _ADAPTER_FILES:
        if (root / file).exists():
            yield Issue("weights with every adapter merged", f"{file} is next to them", file=root / file)
    if (root / _BELOW / _ADAPTER_FILES[0]).exists():
        tally.note(
            f"{_BELOW}/ holds an adapter, next to which verl's model merger writes the base: `ckptkit verify {root} "
            f"--source BASE --adapter {root / _BELOW}` says whether it is in these weights"
        )
    listed = subject.hf_files.index or {} if subject.is_hf else {}
    every = dict.fromkeys([*names, *listed])
    # A prefix of all names is that of a wrapper, which CK104 names.
    parts = _ADAPTER_NAMES if all(name.startswith(_WRAPPER) for name in every) else (*_ADAPTER_NAMES, _WRAPPER)
    together = "\n".join(every)  # one look at all of them, since there are hundreds of thousands and as a rule none
    found = any(part in together for part in parts)
    odd = [name for name in every if any(part in name for part in parts)] if found else []
    yield Issue("weights with every adapter merged", "a tensor of an adapter", names=odd, file=root, together=True)
