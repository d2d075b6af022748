"""Compares the files next to the weights that loaders read, except config.json and the files of a quantizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptkit.core.json_text import parse
from ckptkit.core.printable import shortened
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.evidence import side_files
from ckptkit.verify.evidence.side.processors import PREPROCESSOR, VIDEO, processor_differences
from ckptkit.verify.evidence.side.templates import RenderedTemplates, is_refusal, render_templates
from ckptkit.verify.evidence.side.texts import first_difference, strings_in
from ckptkit.verify.evidence.side.tokenizers import SPECIAL, tokenizer_differences
from ckptkit.verify.evidence.side_files import GENERATION, PROCESSOR_CONFIG, TOKENIZER_CONFIG, SideDifference, SideFiles

# Other checks compare these files, which a conversion, a merge or a quantizer rewrites.
_COMPARED_ELSEWHERE = frozenset(
    {"config.json", "adapter_config.json", "metadata.json", "model.safetensors.index.json"}
    | {"quant_config.json", "quantize_config.json", "quantization_config.json", "hf_quant_config.json"}
)
_CODE = "auto_map"
_WITH_CODE = ("config.json", TOKENIZER_CONFIG, PROCESSOR_CONFIG, PREPROCESSOR, VIDEO)
# Defaults of keys that generation_config.json lacks; those of other keys are null, false or zero. Source:
# transformers, `GenerationConfig` of 4.57, and `_get_default_generation_params` of 5.12.
_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("temperature", "top_p", "typical_p", "repetition_penalty", "length_penalty"), 1.0),
    **dict.fromkeys(("encoder_repetition_penalty", "num_beams", "num_return_sequences", "num_beam_groups"), 1),
    **dict.fromkeys(("max_length", "num_assistant_tokens"), 20),
    **dict.fromkeys(("target_lookbehind", "assistant_lookbehind"), 10),
    "top_k": 50,
    "use_cache": True,
    "max_matching_ngram_size": 2,
    "assistant_confidence_threshold": 0.4,
    "num_assistant_tokens_schedule": "constant",
}
_NOT_OF_GENERATION = ("transformers_version", "_from_model_config", "_commit_hash")


def side_differences(here: SideFiles, there: SideFiles, place: str) -> Iterator[SideDifference]:
    """Compares all files with those of `there`, named `place` ("in the source"). Raises as `text_differences`."""
    yield from _generation(here, there, place)
    yield from code_differences(here, there, place)
    yield from processor_differences(here, there, place)
    yield from _remaining_files(here, there, place)
    yield from text_differences(here, there, place)


def text_differences(here: SideFiles, there: SideFiles, place: str) -> Iterator[SideDifference]:
    """Compares chat templates and tokenizers. Raises CkptkitError, and at the end CannotCheck without a library."""
    unable: CannotCheck | None = None
    for differences in (template_differences, tokenizer_differences):
        try:
            yield from differences(here, there, place)
        except CannotCheck as reason:
            unable = unable or reason
    if unable is not None:
        raise unable


def template_differences(here: SideFiles, there: SideFiles, place: str) -> Iterator[SideDifference]:
    """Compares chat templates of any file by name and by the conversations that they render with transformers."""
    for name in dict.fromkeys(name for side in (there, here) for _, name, _ in side.template_places):
        places = (reversed(side.template_places) for side in (here, there))
        mine, its = ({text: file for file, other, text in some if other == name} for some in places)
        what = f"chat template {name!r}"
        if mine.keys() == its.keys():
            yield from _unread_template(here, there, name)
            continue
        if not mine:
            yield SideDifference(next(iter(its.values())), what, "missing", is_presentation=True)
            continue
        odd = [text for text in mine if text not in its] or list(mine)
        words = f"{what} has {len(odd[-1])} characters"
        if (other := there.templates.get(name, next(iter(its), None))) is None:
            yield SideDifference(mine[odd[-1]], what, f"{words} but is missing {place}", is_presentation=True)
            continue
        tokens = {f"{kind}_token": token for kind in SPECIAL if (token := there.special(kind)) is not None}
        rendered = render_templates([other, *odd], tokens)
        shown = [_describe_rendered(texts, rendered) for texts in rendered.texts[1:]] if rendered else []
        if rendered and not any(shown):
            yield from _unread_template(here, there, name)
            continue
        odd, shown = (odd, shown) if not any(shown) else ([odd[shown.index(max(shown))]], [max(shown)])
        at = first_difference(odd[-1], other)
        apart = f"from character {at} on {shortened(odd[-1][at : at + 24])} instead of {shortened(other[at : at + 24])}"
        words = f"{what} has {len(odd[-1])} characters but {len(other)} {place}, {apart}"
        words += f"; {shown[-1]} {place}" if shown else ""
        yield SideDifference(mine[odd[-1]], what, words, source=its.get(other), is_presentation=True)


def _describe_rendered(texts: Sequence[str], rendered: RenderedTemplates) -> str:
    for name, text, other in zip(rendered.names, texts, rendered.texts[0], strict=True):
        if text != other and not (is_refusal(text) and is_refusal(other)):
            start = max(0, first_difference(text, other) - 12)
            shown = [shortened(one[start : start + 48]) for one in (text, other)]
            return f"{name} is rendered as {shown[0]} but {shown[1]}"
    return ""


def _unread_template(here: SideFiles, there: SideFiles, name: str) -> Iterator[SideDifference]:
    """A template in a file that the tokenizer or the processor does not read."""
    mine, its = ({file for file, other, _ in side.template_places if other == name} for side in (here, there))
    readers = {"tokenizers": {"chat_template.json", PROCESSOR_CONFIG}}
    if here.json(PROCESSOR_CONFIG) or here.json(PREPROCESSOR):
        readers["processors"] = {TOKENIZER_CONFIG}
    for reader, unread in readers.items():
        if mine <= unread and not its <= unread:
            file = min(mine)
            words = f"the template is only in {file}, which {reader} do not read"
            yield SideDifference(file, f"chat template {name!r}", words, is_presentation=True)


def _generation(here: SideFiles, there: SideFiles, place: str) -> Iterator[SideDifference]:
    """Settings of generation_config.json; token ids that it lacks are those of config.json."""
    mine, its = here.generation, there.generation
    keys = [key for key in {**its, **mine} if key not in _NOT_OF_GENERATION]
    pairs = {key: (mine.get(key), its.get(key)) for key in keys if _value(here, key) != _value(there, key)}
    harmless = {"pad_token_id", "use_cache", "cache_implementation"} | {key for key in pairs if "output_" in key}
    before = "" if mine else "the file is missing: "
    wrong = {key: pair for key, pair in pairs.items() if key not in harmless}
    yield from side_files.setting_differences(GENERATION, wrong, place, "error", before)
    rest = {key: pair for key, pair in pairs.items() if key in harmless}
    yield from side_files.setting_differences(GENERATION, rest, place, "warning", before)


def _value(side: SideFiles, key: str) -> Any:
    """The effective value of a generation setting; token ids as a sorted list."""
    value = side.generation.get(key)
    if key.endswith("_token_id"):
        text = side.config.get("text_config")
        inner = text.get(key) if isinstance(text, Mapping) else None
        value = side.config.get(key, inner) if value is None else value
        return sorted(map(repr, value if isinstance(value, list) else [value]))
    return value if value not in ((None, _DEFAULTS[key]) if key in _DEFAULTS else (None, False, 0)) else None


def code_differences(here: SideFiles, there: SideFiles, place: str) -> Iterator[SideDifference]:
    """Compares Python files at any depth, and the entries of `auto_map`, the code that `trust_remote_code` runs."""
    is_mapped, known = False, {one for file in _WITH_CODE for one in _named_code(there.json(file))}
    for file in _WITH_CODE:
        entries = _named_code(here.json(file))
        is_mapped = is_mapped or bool(entries)
        if odd := [one for one in entries if one not in known]:
            words = f"{_CODE} names the code {shortened(odd[0])}, but not {place}"
            yield SideDifference(file, f"no {_CODE} of {shortened(odd[0])}", words, count=len(odd))
        elif away := [one for one in entries if one.startswith("/")]:  # transformers reads any path
            words = f"{_CODE} names the code {shortened(away[0])}, which is outside the checkpoint and was not compared"
            yield SideDifference(file, f"no {_CODE} of {shortened(away[0])}", words, count=len(away))
    mine, its = ({name for name in side.loaded if name.endswith(".py")} for side in (here, there))
    for name in sorted(mine | its):
        if name not in its:
            words = f"trust_remote_code runs this file, which does not exist {place}"
            yield SideDifference(name, "no such Python file", words)
        elif name not in mine:
            if is_mapped:  # otherwise nothing runs the code
                yield SideDifference(name, "the Python file", "missing, although auto_map names code")
        elif here.content(name) != there.content(name):
            yield SideDifference(name, "the Python file", f"its content differs from the file {place}")


def _named_code(content: Any) -> list[str]:
    """Every text in an `auto_map` of a JSON file or of a part of it, such as an image processor."""
    if isinstance(content, list):
        return [text for one in content for text in _named_code(one)]
    items = content.items() if isinstance(content, Mapping) else ()
    return [text for key, value in items for text in (strings_in(value) if key == _CODE else _named_code(value))]


def _remaining_files(here: SideFiles, there: SideFiles, place: str) -> Iterator[SideDifference]:
    """Compares the content of other files that loaders read. A missing one is a warning."""
    done = {*here.tokenizer_files, *there.tokenizer_files, GENERATION, PREPROCESSOR, VIDEO, PROCESSOR_CONFIG}
    done |= {file for side in (here, there) for file, _, _ in side.template_places} | _COMPARED_ELSEWHERE
    mine, its = ({name for name in side.loaded if not name.endswith(".py")} - done for side in (here, there))
    for name in sorted(mine | its):
        if name not in its:
            yield SideDifference(name, f"no {name}", f"loaders read this file, which does not exist {place}")
        elif name not in mine:
            yield SideDifference(name, name, "missing", "warning")
        elif not _is_equal(here.content(name), there.content(name)):
            yield SideDifference(name, name, f"its content differs from the file {place}")


def _is_equal(content: bytes | None, other: bytes | None) -> bool:
    if content == other:
        return True
    try:
        return bool(parse(content or b"") == parse(other or b""))
    except ValueError:  # it is not JSON
        return False
