"""CK108 and CK110: saves that were mixed, renamed or never merged, by the names of files and tensors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from ckptkit.core.specs import ranges
from verify.check import Skip, Tally, check
from verify.checks.headers.files import names_of, only_hf
from verify.evidence.hf_files import HfFiles
from verify.evidence.subject import Subject
from verify.issue import Issue

_NUMBERED = re.compile(r"(.+?)-?(\d+)-of-(\d+)\.safetensors")
# Files of peft, and what peft, slime's trainer and megatron-core's adapters put into names of tensors.
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_BELOW = "lora_adapter"
_ADAPTER_NAMES = (
    *("lora_A", "lora_B", "lora_embedding", "lora_magnitude"),
    *(".adapter.linear_in.", ".adapter.linear_out.", ".adapter.adapter_"),
)
_WRAPPER = "base_model.model."


@check(
    "CK108",
    "shards are numbered as their names promise",
    rationale="A name like model-00003-of-00048 promises 48 files. An index that was written with a loss agrees with "
    "that loss; the numbers do not.",
    fix="Copy or download the shard of the missing number; move shards of an earlier save elsewhere; give a renamed "
    "one its name back.",
    unless=only_hf,
)
def shards_numbered(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The numbers 1 to N, or from 0, each once and with one N; and no shard that was only renamed."""
    files = subject.hf_files
    if not files.wanted:
        raise Skip("there are no shards (CK103)")
    tally.compared(0, len(files.wanted))
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
    homes: dict[str, set[str]] = defaultdict(set)
    for name, file in (files.index or {}).items():
        homes[file].add(name)
    found = {file: held.get(frozenset(homes[file])) for file in files.missing if homes[file]}
    renamed = [(file, other) for file, other in found.items() if other]
    if renamed:
        (missing, other), more = renamed[0], len(renamed) - 1
        actual, hint = f"its tensors lie in {other}, which the index does not name", f"rename {other} to {missing}"
        hint += f", and {more} more in the same way" if more else ""
        yield Issue(missing, actual, hint, file=missing, count=len(renamed))


@check(
    "CK110",
    "no LoRA adapter is left unmerged",
    rationale="An engine that loads the directory without its adapter serves the base model; one that meets adapter "
    "tensors skips them.",
    fix="Merge the adapter into the weights (`ckptkit convert BASE DST --merge ADAPTER`), or take its files out of the "
    "directory.",
)
def adapters_merged(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """No adapter files beside the weights, no adapter names among the tensors."""
    names = names_of(subject)
    tally.compared(0, len(_ADAPTER_FILES) + len(names))
    root = subject.weights_root
    for file in _ADAPTER_FILES:
        if (root / file).exists():
            yield Issue("weights with every adapter merged", f"{file} lies beside them", file=root / file)
    if (root / _BELOW / _ADAPTER_FILES[0]).exists():
        tally.note(
            f"{_BELOW}/ holds an adapter, beside which verl's model merger writes the base: `ckptkit verify {root} "
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
