"""CK104: index, shards and config name the same tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.reader import INDEX
from ckptkit.formats.hf.side_files import describe_quantization
from converters.registry import family_of
from converters.stored import OtherSpelling
from quant.formats.part_names import PACKED, SCALE, SHAPE
from verify.check import Tally, check
from verify.checks.headers.files import names_of
from verify.checks.headers.layer_counts import layer_table, uneven
from verify.checks.headers.leftovers import leftovers
from verify.checks.headers.mismatch import Mismatch
from verify.checks.headers.renamed import renamed_of
from verify.evidence.expected import (
    CACHE_SCALE,
    Expected,
    expected_of,
    remarks_of,
    spelling_of,
    stated_config_of,
    tied_head_of,
    usable_config,
)
from verify.evidence.hf_files import HfFiles
from verify.evidence.subject import Subject
from verify.issue import Issue


@check(
    "CK104",
    "index, shards and config name the same tensors",
    stage="headers",
    gate=True,
    rationale="A converter that loses a tensor usually writes an index that agrees with its own loss. Only the config "
    "tells what should be there.",
    fix="Convert again from the release. If config.json belongs to another model, restore it.",
    explained_by=("CK103", "CK110"),
)
def same_names(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Index, headers and config name the same tensors (Megatron: `.metadata` and config); no duplicates or orphans."""
    specs = names_of(subject, listed=True)
    config = usable_config(subject)
    expected = subject.once(expected_of)
    tally.compared(0, len(specs) or len(subject.hf_files.unknown))
    if subject.is_hf:
        yield from leftovers(subject.hf_files)
    yield from other_names(subject)
    yield from _three_way(subject, specs, expected)
    for text in remarks_of(subject) if config else ():
        tally.note(text)
    if subject.is_hf and (tied := tied_head_of(subject)) and tied[0] in specs:
        tally.note(
            f"{tied[0]} is stored although tie_word_embeddings is true; only its values show whether it repeats "
            f"{tied[1]} (CK211)"
        )
    tally.facts["tensors per layer"] = layer_table(subject.kinds, dict(config) if config else None)
    if expected is None:
        yield from uneven(specs, str(subject.path))


def _three_way(subject: Subject, specs: Mapping[str, TensorSpec], expected: Expected | None) -> Iterator[Issue]:
    files = subject.hf_files if subject.is_hf else None
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
    config = usable_config(subject)
    why = Mismatch(config, {**specs, **(index or {})}) if config else None
    for name in _not_everywhere(specs, index, expected.shapes if expected else None):
        if name in known or (spelling and spelling.explains(name, specs, promises)):
            continue
        stored, listed = name in specs or name in unknown, index is None or name in index
        promised = expected is None or name in expected.shapes or name in optional
        if not (stored and listed and promised) and (name not in optional or stored or listed):
            reasons[_verdict(subject, name, stored, listed, promised, index is not None, why)].append(name)
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
    subject: Subject, name: str, stored: bool, listed: bool, promised: bool, indexed: bool, why: Mismatch | None
) -> tuple[str, str, str]:
    """What should be, what is and the next move, for a name that is not everywhere that it should be."""
    holder = "shard" if subject.is_hf else ".metadata"
    if not promised:
        if PACKED in name or name.endswith((SCALE, SHAPE)):
            return (
                "no packed tensor, by config.json",
                "stored, and config.json does not say that it is packed",
                f"{describe_quantization(subject.hf_files.config)}: restore what the release has, or quantize again",
            )
        if CACHE_SCALE.fullmatch(name):
            return (
                "no scale of a quantized cache, by config.json",
                "stored, and config.json has no kv_cache_scheme",
                "transformers and SGLang drop it: restore kv_cache_scheme in quantization_config, or remove the scales",
            )
        place = "stored, and config.json does not promise it" if stored else "in the index, but in no shard"
        return (
            "only tensors that config.json promises",
            place,
            why.why_unexpected(name) if why and stored else "restore the index: no file holds what it lists there",
        )
    if not stored:
        place = (
            f"in no {holder}, though the index lists it"
            if indexed and listed
            else f"in no {holder}"
            if subject.is_hf
            else "not in .metadata"
        )
        return (
            "stored, as config.json promises" if promised else "stored",
            place,
            why.why_missing(name)
            if why and not (indexed and listed)
            else "convert or download it again; loading leaves it random",
        )
    return (
        "listed in the index",
        "in a shard, but not in the index",
        "restore the index: a loader that follows it leaves this tensor random",
    )


_ALONE = "model."  # what a class of the language model alone calls its layers


def other_names(subject: Subject) -> Iterator[Issue]:
    """One issue for all tensors of the layers, a warning where transformers renames them while it loads."""
    if (found := subject.once(spelling_of)) is None:
        return
    config = subject.once(stated_config_of)
    family = family_of(config)
    multimodal = bool(family.towers(config))
    count = sum(one.startswith(found.found) for one in subject.specs)
    whose, hint = _whose(found, multimodal)
    yield Issue(
        f"{found.expected or 'layers.'}*, the layer names of {family.class_of(config)} in config.json",
        f"{found.found}*, which {whose}: {count} tensors",
        hint,
        file=subject.path / "config.json",
        severity="warning" if found.renamed else "error",
    )


def _whose(found: OtherSpelling, multimodal: bool) -> tuple[str, str]:
    """Which classes have these names, and what to do."""
    if found.whose:
        return f"are those of {found.whose}", (
            "engines load the names of the release: take its tensors, or rename these one by one"
        )
    rename = f"rename the tensors to {found.expected}* (and in the index)"
    if found.renamed:
        return "the multimodal class uses", (
            "transformers and newer releases of vLLM rename them while they load, SGLang does not: take config.json "
            f"of the multimodal release with its vision tower, or {rename}"
        )
    if not multimodal:
        return "a multimodal class uses", f"take config.json of the multimodal release, or {rename}"
    if found.found == _ALONE:
        return (
            "a class of the language model alone uses",
            f"take config.json of the language model alone, or {rename}",
        )
    return "transformers uses internally since 4.52", (
        f"transformers loads both, SGLang the names of the release: save with save_original_format=True, or {rename}"
    )
