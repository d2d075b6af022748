"""For CK104: layers that are stored under the names of another class."""

from __future__ import annotations

from collections.abc import Iterator

from converters.registry import family_of
from converters.stored import OtherSpelling
from verify.evidence.expected import spelling_of, stated_config_of
from verify.evidence.subject import Subject
from verify.issue import Issue

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
