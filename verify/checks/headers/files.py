"""CK101 to CK106: what headers and JSON files alone can tell. No weight is read, and every problem is listed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError, UnknownModelError, UnsupportedError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.detect import LOADED, other_weights, refuse_other_format
from ckptkit.formats.hf.reader import INDEX
from ckptkit.formats.hf.side_files import is_hidden, is_weight
from ckptkit.storage.links import fetch_again, in_words
from converters.planner import tied_head
from quant.formats.part_names import PACKED, SCALE, SHAPE
from verify.check import Skip, Tally, check
from verify.checks.headers.layer_counts import layer_table, uneven
from verify.checks.headers.leftovers import leftovers
from verify.checks.headers.renamed import renamed_of
from verify.checks.headers.spelling import other_names
from verify.evidence.expected import Expected, config_of, expected_of, remarks_of, spelling_of, usable_config
from verify.evidence.folding import alike
from verify.evidence.hf_files import HfFiles
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.report import Severity

_AGAIN = "copy or download this file again"


def only_hf(subject: Subject) -> str | None:
    """For checks of safetensors files."""
    return None if subject.kind == "hf" else "a Megatron checkpoint has no safetensors files"


def names_of(subject: Subject, listed: bool = False) -> Mapping[str, TensorSpec]:
    """Every tensor that headers or `.metadata` name. Raises Skip where there are none to read (CK102, CK103, CK111).

    `listed`: those that the index lists in files that cannot be read will do.
    """
    if subject.kind == "megatron":
        require_metadata(subject)
        if not subject.specs:
            raise Skip("not run because there are no weights (CK111)")
    else:
        require_weights(subject)
        if not subject.specs and not (listed and subject.hf_files.unknown):
            raise Skip("not run because no header names a tensor (CK102)")
    return subject.specs


def require_weights(subject: Subject) -> None:
    """Raises Skip where an HF directory holds no safetensors file and names none, which CK103 reports.

    Raises UnsupportedError as `refuse_other_format`.
    """
    refuse_other_format(subject.path)
    if not subject.hf_files.wanted:
        raise Skip("not run because there are no weights (CK103)")


def require_metadata(subject: Subject) -> None:
    """Raises Skip where the `.metadata` of a Megatron checkpoint cannot be read, which CK111 reports."""
    if not subject.megatron_files.readable:
        raise Skip("not run because .metadata cannot be read (CK111)")


@check(
    "CK101",
    "config.json describes a supported model",
    stage="headers",
    gate=True,
    rationale="Every expected name and shape follows from the config. A config of another model makes loaders skip or "
    "misread tensors.",
    fix="Restore config.json from the release that the weights belong to.",
)
def config_usable(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The config is there, is JSON, is of a supported family, and its sizes make sense."""
    if subject.kind == "megatron":
        require_metadata(subject)
    elif "config.json" in subject.hf_files.dangling:
        raise Skip("not run because config.json is a link that leads nowhere (CK102)")
    try:
        subject.once(config_of)
        tally.compared(0)
    except CkptkitError as error:
        # A launch of a model that is not known here may be right; the trainer may know it.
        known = not isinstance(error, UnknownModelError) or subject.arguments is not None
        if isinstance(error, UnsupportedError) and known:
            raise
        path = subject.path if subject.kind == "hf" else subject.megatron_files.opened.hf_path
        hint = error.hint or "compare it with the release"
        said = error.message.removeprefix("config.json: ")
        yield Issue("the config of a supported model", said, hint, file=path / "config.json")


@check(
    "CK102",
    "every shard is there and whole",
    stage="headers",
    gate=True,
    rationale="A truncated shard can be mapped beyond its end and then reads as zeros or garbage; some loaders skip an "
    "absent one silently.",
    fix="Download or copy the named file again, or run the conversion again.",
    unless=only_hf,
)
def shards_whole(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every file of the index is there, and its size and offsets are what its own header says; links lead somewhere."""
    files = subject.hf_files
    yield from _links(files)
    require_weights(subject)
    gone = [file for file in files.missing if file not in files.dangling]
    if gone:
        yield _together(files, gone, "the file, since the index names it", "it is not there", "copy or download it")
    whole: dict[tuple[str, str], list[str]] = defaultdict(list)
    for file, shard in files.shards.items():
        tally.compared(0, len(shard.specs) or 1)
        for fault in shard.faults:
            if fault.name is None:
                whole[fault.expected, fault.actual].append(file)
            else:
                yield Issue(fault.expected, fault.actual, _AGAIN, (fault.name,), shard.path)
        if not shard.faults and not files.specs:
            whole["tensors", "its header names none"].append(file)
    for (expected, actual), found in whole.items():
        yield _together(files, found, expected, actual, _AGAIN)


def _links(files: HfFiles) -> Iterator[Issue]:
    """The links of the directory that lead nowhere; a warning where loaders read none of them."""
    links = {name: target for name, target in files.dangling.items() if not is_hidden(name)}
    if links:
        read = any(is_weight(name) or name in LOADED for name in links)
        where = files.root / next(iter(links)) if len(links) == 1 else files.root
        severity: Severity = "error" if read else "warning"
        actual, hint = in_words(links), fetch_again(files.root)
        yield Issue("a file behind every link", actual, hint, file=where, severity=severity, count=len(links))


def _together(files: HfFiles, found: Sequence[str], expected: str, actual: str, hint: str) -> Issue:
    """What is wrong with one file, or with several in the same way."""
    if len(found) == 1:
        return Issue(expected, actual, hint, file=files.root / found[0])
    several = f"{found[0]} and {len(found) - 1} more: {actual.removeprefix('it is ')}"
    return Issue(expected, several, hint, file=files.root, count=len(found))


@check(
    "CK103",
    "the index is sound",
    stage="headers",
    gate=True,
    rationale="Loaders find tensors through model.safetensors.index.json; an entry that points out of the directory "
    "reads a file of somebody else.",
    fix="Restore model.safetensors.index.json from the release, or convert again.",
    unless=only_hf,
)
def index_sound(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The index is JSON with a weight_map, and every entry is a file of this directory."""
    if INDEX in subject.hf_files.dangling:
        raise Skip("not run because the index is a link that leads nowhere (CK102)")
    refuse_other_format(subject.path)
    tally.compared(0)
    hint = "restore it from the release"
    if not (files := subject.hf_files).wanted and files.index is None:
        hint = other_weights(files.root) or "download its weights, as safetensors"
    for issue in files.index_issues:
        yield replace(issue, hint=hint, file=files.root / INDEX)


@check(
    "CK104",
    "index, shards and config name the same tensors",
    stage="headers",
    gate=True,
    rationale="A converter that loses a tensor usually writes an index that agrees with its own loss. Only the config "
    "tells what should be there.",
    fix="Convert again from the release. If config.json belongs to another model, restore it.",
)
def same_names(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Index, headers and config name the same tensors (Megatron: `.metadata` and config); no duplicates or orphans."""
    specs = names_of(subject, listed=True)
    config = usable_config(subject)
    expected = subject.once(expected_of)
    tally.compared(0, len(specs) or len(subject.hf_files.unknown))
    if subject.kind == "hf":
        yield from leftovers(subject.hf_files)
    yield from other_names(subject)
    yield from _three_way(subject, specs, expected)
    for text in remarks_of(subject) if config else ():
        tally.note(text)
    if subject.kind == "hf" and config and (tied := tied_head(config)) and tied[0] in specs:
        tally.note(
            f"{tied[0]} is stored although tie_word_embeddings is true; that it repeats {tied[1]} can be told "
            "from values only (CK211)"
        )
    tally.facts["tensors per layer"] = layer_table(subject.kinds, dict(config) if config else None)
    if expected is None:
        yield from uneven(specs, str(subject.path))


def _three_way(subject: Subject, specs: Mapping[str, TensorSpec], expected: Expected | None) -> Iterator[Issue]:
    files = subject.hf_files if subject.kind == "hf" else None
    index = files.index if files else None
    unknown = files.unknown if files else frozenset()
    optional = expected.optional if expected else frozenset()
    reasons: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    where = subject.path / INDEX if index is not None else subject.path
    spelling, promises = subject.once(spelling_of), expected.shapes if expected else {}
    known: frozenset[str] = frozenset()
    if (change := subject.once(renamed_of)) is not None:
        known = change.promised.union(change.stored)
        wanted = f"names such as {min(change.promised)}"
        yield Issue(wanted, change.change, change.hint, names=change.stored, file=where, together=True)
    for name in _not_everywhere(specs, index, expected.shapes if expected else None):
        if name in known or (spelling and spelling.explains(name, specs, promises)):
            continue
        stored, listed = name in specs or name in unknown, index is None or name in index
        promised = expected is None or name in expected.shapes or name in optional
        if not (stored and listed and promised) and (name not in optional or stored or listed):
            reasons[_verdict(subject, name, stored, listed, promised, index is not None)].append(name)
    if moved := list(_moved(files)) if files else []:
        reasons["in the shard that the index names", "in another shard", "restore the index"] = moved
    for (should, actual, hint), found in reasons.items():
        yield Issue(should, actual, hint, names=found, file=where)


def _not_everywhere(*several: Mapping[str, Any] | None) -> Iterator[str]:
    """Names that one of these has and another has not, each once; in the order of the first that has it."""
    known = [names.keys() for names in several if names is not None]
    odd = set[str]().union(*(known[0] ^ other for other in known[1:] if known[0] != other))
    return iter(dict.fromkeys(name for names in known for name in names if name in odd) if odd else ())


def _moved(files: HfFiles) -> Iterator[str]:
    """Tensors that the index puts into one readable shard, and that lie in another one alone."""
    index = files.index or {}
    for file, shard in files.shards.items():
        for name in shard.specs:
            home = index.get(name, file)
            if (
                home != file
                and home in files.shards
                and files.shards[home].readable
                and name not in files.shards[home].specs
            ):
                yield name


def _verdict(
    subject: Subject, name: str, stored: bool, listed: bool, promised: bool, indexed: bool
) -> tuple[str, str, str]:
    """What should be, what is and the next move, for a name that is not everywhere that it should be."""
    holder = "shard" if subject.kind == "hf" else ".metadata"
    if not promised:
        if PACKED in name or name.endswith((SCALE, SHAPE)):
            return (
                "no packed tensor, by config.json",
                "stored",
                "config.json has no quantization_config, or this weight is not packed as a whole",
            )
        place = "stored" if stored else "in the index, but in no shard"
        return (
            "only tensors that config.json promises",
            place,
            "check num_hidden_layers, num_nextn_predict_layers, experts and model_type in config.json",
        )
    if not stored:
        place = (
            f"in no {holder}, though the index lists it"
            if indexed and listed
            else f"in no {holder}"
            if subject.kind == "hf"
            else "not in .metadata"
        )
        return (
            "stored, as config.json promises" if promised else "stored",
            place,
            "convert or download it again; loading leaves it random",
        )
    return (
        "listed in the index",
        "in a shard, but not in the index",
        "restore the index: a loader that follows it leaves this tensor random",
    )


@check(
    "CK105",
    "shapes are those of the config",
    stage="headers",
    gate=True,
    rationale="A shape that differs means another model, a wrong merge of gate and up or q, k and v, or a vocabulary "
    "cut to the tokenizer's size.",
    fix="Restore the config.json that belongs to these weights, or convert again.",
)
def same_shapes(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every shape equals the config's; only Megatron's vocabulary may be padded with more rows."""
    specs = names_of(subject)
    expected = subject.once(expected_of)
    if expected is None:
        raise Skip("there is no usable config.json (CK101)")
    if (spelling := subject.once(spelling_of)) and not spelling.renamed:
        raise Skip(f"not run because the layers are stored under {spelling.found}* (CK104)")
    wrong: dict[tuple[str, str], list[str]] = defaultdict(list)
    known = sum(map(specs.__contains__, expected.shapes))
    if not known:
        raise Skip("not run because no tensor has a name that config.json promises (CK104)")
    tally.compared(0, known)
    for name, shape in expected.shapes.items():
        if shape is None or name not in specs or (actual := specs[name].shape) == shape:
            continue
        padded = name in expected.vocab and actual[:1] > shape[:1] and actual[1:] == shape[1:]
        if not padded:
            wrong[f"shape {list(shape)}", f"shape {list(actual)}"].append(name)
    for (want, found), group in wrong.items():
        for names in alike(group):
            hint = "check this tensor and the sizes in config.json against the release"
            yield Issue(want, found, hint, names=names, file=home_of(subject, names[0]))


def home_of(subject: Subject, name: str) -> str:
    """The file or directory that holds a tensor."""
    if subject.kind == "megatron":
        return str(subject.megatron_files.weights)
    found: list[Path] = [shard.path for shard in subject.hf_files.shards.values() if name in shard.specs]
    return str(found[0])


def _no_index_needed(subject: Subject) -> str | None:
    single = subject.kind == "hf" and subject.hf_files.index is None and not subject.hf_files.index_issues
    return "a single file needs no index" if single else only_hf(subject)


@check(
    "CK106",
    "total_size is the sum of all tensors in bytes",
    stage="headers",
    rationale="Loaders do not read total_size, so it is only a warning. One that is not the sum shows an index that "
    "was not written with these shards.",
    fix="Set metadata.total_size in model.safetensors.index.json to the number given, after the other CK1xx checks "
    "pass.",
    unless=_no_index_needed,
)
def total_size_true(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The index's `metadata.total_size` against the headers."""
    files = subject.hf_files
    if not files.index:
        raise Skip("there is no usable index (CK103)")
    if files.unknown:
        raise Skip("not run because some shards cannot be read (CK102)")
    tally.compared(0, len(files.specs))
    if files.index.keys() != files.specs.keys():
        raise Skip("not run because index and shards name different tensors (CK104)")
    actual = (
        sum(spec.nbytes for spec in files.specs.values())
        if files.twice
        else sum(shard.nbytes for shard in files.shards.values())
    )
    if files.total_size != actual:
        hint = "set metadata.total_size to the sum; loaders do not read it"
        rows = sum(spec.shape[0] for spec in files.specs.values() if spec.shape)
        said = f"total_size {files.total_size}" + (", which is the number of rows" if files.total_size == rows else "")
        said = "no total_size" if files.total_size is None else said
        yield Issue(f"total_size {actual}", said, hint, file=subject.path / INDEX, severity="warning")
