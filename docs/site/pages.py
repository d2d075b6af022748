"""MkDocs' hook: pages made from the code, pages from outside docs/, and Markdown as GitHub reads it.

`checks.md` and the reference are made anew in each build, so they cannot differ from the code.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
# Pages that lie elsewhere in the repository, under the same path in the site.
OUTSIDE = ("SECURITY.md", "CHANGELOG.md", "benchmarks/README.md")
_FENCE = re.compile(r"\s*(```|~~~)")
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]*)(#[^)]*)?\)")
_CODE = re.compile(r"(`[^`]*`|\[[^\]]*\]\([^)]*\))|\b(CK\d{3})\b")
_MARK = re.compile(r"<!-- (?:not )?run.*-->")
_SYMPTOM = re.compile(r"### (S(\d+)\. .*)")

# What a check finds, where neither a mutation of the tests nor a symptom shows it.
EXAMPLES = {
    "CK119": "the manifest was written anew after it had been signed",
    "CK309": "an asymmetric mixture of experts in groups of 32, as slime's converter makes it without --is-symmetric",
    "CK401": "the launch has one layer more than the checkpoint, or a router bias that it lacks",
    "CK403": "a pipeline layout in which a stage repeats the layers of the one before",
    "CK404": "a tensor on disk, say of a multi-token prediction layer, that no rank asks for",
    "CK405": "expert 0 of the second expert parallel rank is exported as expert 0 of the model",
    "CK501": "a shape that SGLang's class does not have: its load_weights raises",
    "CK506": "INT4 weights whose zero points SGLang's repacking reads in another order",
    "CK507": "8 tensor parallel ranks asked of a model with 6 heads",
    "CK508": "multi-token prediction layers whose draft class SGLang's release does not have",
    "CK511": "the engine answers with NaN",
    "CK602": "a rollout whose log-probabilities belong to the weights of an earlier step",
    "CK603": "prompts that were rendered with another model's chat template",
    "CK604": "fluent text that transformers would not write with these weights",
    "CK605": "router biases that were rounded, so that near ties fall to other experts",
    "CK606": "a rotary base that the Megatron arguments do not give",
    "CK714": "--hf-checkpoint names a Megatron directory",
    "CK717": "--load takes its path from a variable that is only set on the cluster",
    "CK718": "--num-layers 94 in the launch of a model with 48 layers",
    "CK719": "--apply-layernorm-1p for a model whose norms do not add 1",
    "CK720": "only config.json and the shards were copied",
    "CK721": "a comment behind a line's continuation, so that all options after it are lost",
    "CK722": "8 GPUs at --tensor-model-parallel-size 2 and --pipeline-model-parallel-size 3",
    "CK724": "a base model's tokenizer, without a chat template, in a launch with --apply-chat-template",
}


def on_files(files: Any, config: Any) -> Any:
    """Adds what does not lie in docs/."""
    for path in OUTSIDE:
        files.append(File.generated(config, path, content=(ROOT / path).read_text()))
    for path, content in {
        "checks.md": checks(),
        "reference-cli.md": command_line(),
        "reference-python.md": api(),
    }.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Markdown as GitHub reads it, with links that hold in the site."""
    source = page.file.src_uri
    at = source if source in OUTSIDE else f"docs/{source}"
    lines, fenced = [], False
    for line in markdown.split("\n"):
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            if _MARK.fullmatch(line):
                continue  # for tests/docs, not for readers
            line = _LINK.sub(lambda found: _link(found, at, source), line)
            line = _SYMPTOM.sub(r"### \1 { #s\2 }", line)
            if source != "checks.md" and not line.startswith("#"):
                line = _CODE.sub(lambda found: found[1] or _code_link(found[2], source), line)
            if lines and _starts_block(line, lines[-1]):
                lines.append("")
        lines.append(line)
    return "\n".join(lines)


def _starts_block(line: str, before: str) -> bool:
    """Whether a list or a table begins right behind a paragraph, which Python-Markdown wants a blank line for."""
    if not before.strip() or before.startswith(("#", "<!--")):
        return False
    if _ITEM.match(line):
        return not _ITEM.match(before) and not before.startswith(" ")
    return line.startswith("|") and not before.startswith("|")


def _link(found: re.Match[str], at: str, source: str) -> str:
    """A link from the file `at` of the repository. Files that are no pages are named, not linked."""
    image, text, target, anchor = found[1], found[2], found[3], found[4] or ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(at), target))
    made = path in ("docs/checks.md", "docs/reference-cli.md", "docs/reference-python.md")
    if not made and not (ROOT / path).exists():
        raise PluginError(f"{at} links to {target}, which does not exist")
    if path == "README.md":
        path = "docs/index.md"
    # The Markdown reports would take the place of the pages beside them.
    page = path.startswith("docs/") and not (path.startswith("docs/examples/") and path.endswith(".md"))
    if page or path in OUTSIDE:
        to = posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(source) or ".")
        return f"{image}[{text}]({to}{anchor})"
    return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"


def _code_link(code: str, source: str) -> str:
    return f"[{code}]({posixpath.relpath('checks.md', posixpath.dirname(source) or '.')}#{code.lower()})"


def checks() -> str:
    """Every check by code: title, cause, example, remedy, and the command that runs it."""
    from verify.check import all_checks

    found = all_checks()
    mutations, symptoms = _mutations(), _symptoms()
    text = ["# Checks by code", ""]
    text += ["`ckptkit explain CODE` prints the same. Search for a code, or for words of a report.", ""]
    text += [f"- [{one.code}](#{one.code.lower()}) {one.title}" for one in found]
    for one in found:
        shown = [f"- {said}" for said in mutations.get(one.code, [])[:4]]
        shown += [
            f"- {said} ([symptom S{number}](symptoms.md#s{number}))" for number, said in symptoms.get(one.code, [])
        ]
        if one.code in EXAMPLES:
            shown.append(f"- {EXAMPLES[one.code]}")
        if not shown:
            raise PluginError(f"{one.code} has no example: add one to docs/site/pages.py")
        text += ["", f"## {one.code}: {one.title} {{ #{one.code.lower()} }}", "", one.rationale, ""]
        text += ["**For example**", "", *shown, "", f"**What to do:** {one.fix}", "", f"**Run it:** `{command(one)}`"]
    return "\n".join(text)


def command(check: Any) -> str:
    """The cheapest command that runs a check."""
    from verify.check import WITNESSES

    if check.stage == "launch":
        return "ckptkit preflight SCRIPT"
    options = ["--source SRC"] if "source" in check.needs else []
    options += [option for need, option in WITNESSES.items() if need in check.needs]
    # Names that the text of a check gives away: it is skipped without them.
    named = {"CK119": "--manifest FILE --manifest-key KEY", "CK120": "--manifest FILE"}
    named |= dict.fromkeys(("CK602", "CK603"), "--rollout-data FILE")
    return " ".join(["ckptkit verify CKPT", *options, *([named[check.code]] if check.code in named else [])])


def _mutations() -> dict[str, list[str]]:
    """What the tests do to a sound checkpoint, by the code that must find it."""
    sys.path.insert(0, str(ROOT / "tests"))
    from mutations import MUTATIONS

    found: dict[str, list[str]] = {}
    for one in MUTATIONS:
        found.setdefault(one.code, []).append(one.imitates)
    return {code: list(dict.fromkeys(said)) for code, said in found.items()}


def _symptoms() -> dict[str, list[tuple[str, str]]]:
    """The numbers and words of docs/symptoms.md, by code."""
    found: dict[str, list[tuple[str, str]]] = {}
    for part in re.split(r"^### S", (ROOT / "docs/symptoms.md").read_text(), flags=re.MULTILINE)[1:]:
        number, _, said = part.partition("\n")[0].partition(". ")
        for code in re.findall(r"CK\d{3}", part.partition("- Checks:")[2].partition("\n")[0]):
            found.setdefault(code, []).append((number, said))
    return found


def command_line() -> str:
    """The reference of the command line, which mkdocs-click reads from click's own objects."""
    directive = ["::: mkdocs-click", "    :module: ckptkit.app.cli", "    :command: cli", "    :prog_name: ckptkit"]
    return "\n".join(["# Command line", "", *directive, "    :depth: 1", "    :style: plain"])


def api() -> str:
    """The reference of the functions in `ckptkit.__all__`, which mkdocstrings reads from the source."""
    return "\n".join(["# Python", "", "All of them are names of `ckptkit`.", *_directives()])


def _directives() -> Iterator[str]:
    import ckptkit

    home = ckptkit._HOME | {"CkptkitError": "ckptkit.core.errors"}
    for name in ckptkit.__all__:
        if name in home:  # not __version__, which is a number
            yield f"\n::: {home[name]}.{name}"
