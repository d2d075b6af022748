"""MkDocs' hook: pages made from the code, pages from outside docs/, and Markdown as GitHub reads it.

The pages of the checks and the reference are made anew in each build, so they cannot differ from the code.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
# Pages that lie elsewhere in the repository, under the same path in the site.
OUTSIDE = ("SECURITY.md", "CHANGELOG.md")
_FENCE = re.compile(r"\s*(```|~~~)")
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]*)(#[^)]*)?\)")
_CODE = re.compile(r"(`[^`]*`|\[[^\]]*\]\([^)]*\))|\b(CK\d{3})\b")
_MARK = re.compile(r"<!-- (?:not )?run.*-->")
_SYMPTOM = re.compile(r"### (S(\d+)\. .*)")

# The chapters of the list of checks, by the first digit of their codes.
_CHAPTERS = {
    "1": "Files and names",
    "2": "Values",
    "3": "Quantized weights",
    "4": "What Megatron holds",
    "5": "What SGLang and vLLM hold",
    "6": "Behaviour",
    "7": "Configuration and launches",
}

# Cause, and what the tool says of it, where neither a mutation of the tests nor a symptom shows what a check finds.
# `…` stands for what another release words otherwise.
EXAMPLES = {
    "CK730": (
        "a Qwen3-VL that was trained on text and exported without its vision tower",
        "model.visual.*: expected stored, because SGLang, vLLM and transformers build it for"
        " Qwen3VLForConditionalGeneration; actual in no shard",
    ),
    "CK731": (
        "a gpt-oss that transformers 5 has loaded and saved",
        'expected "swiglu_limit": 7.0, which SGLang\'s class reads; actual no swiglu_limit',
    ),
    "CK136": (
        "an adapter whose alpha was doubled on its way to the engine",
        "expected lora_alpha = 8, as in the source; actual lora_alpha = 16",
    ),
    "CK142": (
        "a draft model whose d2t holds tokens where engines add the place",
        "d2t: expected different tokens d2t[i] + i from 0 to 351; actual 7 are outside, 4 are repeated",
    ),
    "CK216": (
        "a trained mixture of experts whose experts 3 and 7 were exchanged on the way out of Megatron",
        "model.layers.5.mlp.experts.{3,7}.down_proj.weight: expected rows near the source's, since training "
        "changes them little; actual 64 of 64 rows have little in common with the source's",
    ),
    "CK732": (
        "a byte-level tokenizer.json under LlamaTokenizerFast",
        "tokenizer_config.json: expected a class that uses tokenizer.json without changes; actual "
        "tokenizer_class 'LlamaTokenizerFast': 'a b' is [64, 65] but [64, 294] in tokenizer.json",
    ),
    "CK215": (
        "a table of DeepSeek-V4 that went through bfloat16",
        "layers.1.ffn.gate.tid2eid: expected numbers from 0 to 11; actual numbers from 0 to 12",
    ),
    "CK124": (
        "a shard that the hub's client received with other bytes than were published",
        "…: expected SHA-256 …, the name of its blob; actual SHA-256 …",
    ),
    "CK309": (
        "an asymmetric mixture of experts, as slime's converter makes it without --is-symmetric",
        "model.layers.{2..11}.mlp.experts.{0..11}.gate_proj.weight_zero_point: expected zero points of experts as "
        "SGLang reads them, [groups, rows / 8] in AWQ's order; actual as compressed-tensors stores them, "
        "[rows / 8, groups], which SGLang 0.5.16 and 0.5.23 take for others",
    ),
    "CK401": (
        "a router bias that a conversion left out",
        "decoder.layers.7.mlp.router.expert_bias: expected on disk, because Megatron requests it; actual not on disk",
    ),
    "CK403": (
        "the second stage holds the layers of the first once more",
        "expected layers 0..11, each once; actual layers 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5",
    ),
    "CK404": (
        "an expert that no rank takes",
        "decoder.layers.5.mlp.experts.experts.linear_fc2.weight: expected each element read by one rank, "
        "which saves it; actual no rank reads [5:6, 0:128, 0:96] of [12, 128, 96], 8.3% of it",
    ),
    "CK122": (
        "a delta that was not copied with the others",
        "expected version 3; actual it is missing",
    ),
    "CK123": (
        "a delta whose copy was cut short",
        "expected 9288 bytes, according to its header; actual 9279 bytes: the file is truncated",
    ),
    "CK221": (
        "deltas replayed onto another base, of which one norm differs",
        "model.norm.weight: expected a valid change from version 0 to 1; actual the new bytes have the checksum …, the "
        "writer's had …",
    ),
    "CK222": (
        "a training step that diverged",
        "model.norm.weight: expected finite numbers; actual 2 elements become NaN or infinite",
    ),
    "CK501": (
        "config.json has a larger vocabulary than the weights",
        "expected SGLang loads the model; actual … the last tensor it was given: model.embed_tokens.weight",
    ),
    "CK506": (
        "zero points of INT4 experts that stay in the order in which they were loaded",
        "m.w13_weight_zero_point[0]: expected the loaded values in the kernel's order; actual 32 of 32 "
        "elements differ, first at [0, 0]: 1687383745 instead of -344372079",
    ),
    "CK507": (
        "--ep 2 without --tp",
        "inconclusive: SGLang was loaded on one rank, since it does not support --ep 2: --ep divides --tp, and --pp "
        "is 1, and tp / ep ranks split an expert; pass these sizes with --against-megatron only",
    ),
    "CK508": (
        "two multi-token prediction layers, where SGLang's draft class takes one",
        "…: expected SGLang builds its draft class and loads the multi-token prediction layers; actual …Only 1 nextn "
        "layer is supported…",
    ),
    "CK511": (
        "the engine answers with NaN",
        "expected a finite log-probability for every token; actual 1 of 2 are not finite, after the start",
    ),
    "CK541": (
        "a Cohere2 checkpoint without a projection of one layer",
        "expected a tensor for each weight of Cohere2ForCausalLM; actual missing, so transformers fills this weight "
        "with random numbers",
    ),
    "CK602": (
        "a rollout of the weights of another step",
        "expected log-probabilities of the engine within 3 times the noise of bfloat16 (mean 0.0154); actual "
        "7.0 times the noise: mean 0.1087 nats per token, largest 0.481; KL 0.011 (k3)",
    ),
    "CK603": (
        "prompts that were rendered with another model's chat template",
        "expected the recorded tokens of sample 1; actual 'l' (79) at token 4, recorded 'p' (83) after "
        "'<bos>hel'; 1 of 2 prompts differ",
    ),
    "CK606": (
        "two tensor parallel ranks, of which one layer's sum is left out",
        "expected log-probabilities of Megatron in float32 within 0.00015 nats of transformers', in the mean "
        "(rounding to bfloat16 changes them by 0.0015); actual a mean difference of 0.07 nats",
    ),
    "CK607": (
        "the first norm of every layer less one",
        "expected at most 1.4 bits per byte for at least one text; actual the model does not predict text: "
        "English 3.97, Python 5.04, Chinese 13.90 bits per byte",
    ),
    "CK714": (
        "--hf-checkpoint names a Megatron directory",
        "expected --hf-checkpoint: an HF directory with config.json; actual a Megatron checkpoint",
    ),
    "CK717": (
        "--ref-load takes its path from a variable that is only set on the cluster",
        "inconclusive: not read among the launch arguments: ${BASE_DIR} (set neither in the script nor in the "
        "environment); set it first: export BASE_DIR=VALUE",
    ),
    "CK718": (
        "--num-layers 94 in the launch of a model with 48 layers",
        "expected num_layers = 48 (from …/config.json); actual num_layers = 94 (at qwen3_moe.sh:3)",
    ),
    "CK719": (
        "no --attention-dropout in the launch, so that Megatron's own 0.1 counts",
        "expected attention_dropout = 0.0, as in generation; actual attention_dropout = 0.1 (by default)",
    ),
    "CK720": (
        "only config.json and the shards were copied",
        "expected tokenizer files, which engines load from this directory; actual the directory has no tokenizer file",
    ),
    "CK721": (
        "a comment behind a line's continuation, so that all options after it are lost",
        "expected a `\\` as the last character of every line of the command except the last line; actual "
        "run.sh:22 begins with --rollout-batch-size, but the command ends above it, so "
        "--rollout-batch-size, --wandb-key, --hf-checkpoint and 21 more are lost",
    ),
    "CK722": (
        "8 GPUs at --tensor-model-parallel-size 2 and --pipeline-model-parallel-size 3",
        "expected a number of GPUs for the actor divisible by tp x pp x cp = 2 x 3 x 1 = 6 (actor_num_nodes and "
        "actor_num_gpus_per_node at line 20, tensor_model_parallel_size and pipeline_model_parallel_size at line 11); "
        "actual 8 GPUs: actor_num_nodes x actor_num_gpus_per_node",
    ),
    "CK724": (
        "a base model's tokenizer, without a chat template, in a launch with --apply-chat-template",
        "expected a chat template, since the command line has --apply-chat-template; actual no template in "
        "chat_template.jinja, tokenizer_config.json or chat_template.json",
    ),
    "CK740": (
        "a Qwen3 model as --opd-teacher-load of a launch that trains Qwen2",
        "decoder.layers.{0..11}.self_attention.linear_qkv.bias, …: expected the model of config.json; actual "
        "another model: add_qkv_bias = False instead of True, qk_layernorm = True instead of False, 36 tensors "
        "with other names or shapes",
    ),
    "CK745": (
        "--sglang-speculative-algorithm EAGLE with a model that has no layers to draft with",
        "expected a model with multi-token prediction layers, or a draft model; actual EAGLE at "
        "run.sh:16, but config.json of qwen3 has no such layers",
    ),
    "CK746": (
        "--global-batch-size 64 with 32 prompts of one sample each",
        "expected global_batch_size of at most rollout_batch_size x n_samples_per_prompt = 32 x 1 = 32; actual "
        "--global-batch-size 64 (run.sh:22), --rollout-batch-size 32 (run.sh:22), no --n-samples-per-prompt",
    ),
    "CK747": (
        "an --hf-checkpoint in ModelOpt's FP8, which a launch of slime serves and updates",
        "expected a quant_method that slime or miles packs: compressed-tensors, fp8, mxfp8, nvfp4; actual 'modelopt': "
        "slime sends BF16, and miles stops",
    ),
    "CK748": (
        "a --ref-load with a HybridModel, in a launch without --hybrid-layer-pattern",
        "expected a GPTModel, as the launch builds; actual a HybridModel",
    ),
}


def on_files(files: Any, config: Any) -> Any:
    """Adds what does not lie in docs/."""
    for path in OUTSIDE:
        files.append(File.generated(config, path, content=(ROOT / path).read_text()))
    for path, content in {
        **checks(),
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
    made = made or path.startswith("docs/checks/")
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
    page = f"checks/{code}.md"
    return code if page == source else f"[{code}]({posixpath.relpath(page, posixpath.dirname(source) or '.')})"


def checks() -> dict[str, str]:
    """A page for each check: title, cause, example, remedy, and the command that runs it; and one that lists them."""
    from ckptkit.verify.core.check import all_checks

    found = all_checks()
    mutations, symptoms = _mutations(), _symptoms()
    text = ["# Checks by code", ""]
    text += ["`ckptkit explain CODE` prints the same. Search for a code, or for words of a report."]
    pages = {}
    for stage, several in groupby(found, lambda one: one.code[2]):
        text += ["", f"## {_CHAPTERS[stage]}", ""]
        text += [f"- [{one.code}](checks/{one.code}.md) {one.title}" for one in several]
    pages["checks.md"] = "\n".join(text)
    for one in found:
        shown = [f"- {said}" for said in mutations.get(one.code, [])[:4]]
        shown += [
            f"- {said} ([symptom S{number}](../symptoms.md#s{number}))" for number, said in symptoms.get(one.code, [])
        ]
        if one.code in EXAMPLES:
            cause, said = EXAMPLES[one.code]
            shown.append(f"- {cause}: {_code(said)}")
        if twin := _twin(one.code):
            shown.append(f"- what {_code_link(twin, f'checks/{one.code}.md')} finds in SGLang")
        if not shown:
            raise PluginError(f"{one.code} has no example: add one to docs/site/pages.py")
        text = [f"# {one.code}: {one.title}", "", one.rationale, "", "**For example**", "", *shown, ""]
        text += [f"**What to do:** {one.fix}", "", f"**Run it:** `{command(one)}`", "", "[All checks](../checks.md)"]
        pages[f"checks/{one.code}.md"] = "\n".join(text)
    return pages


def _twin(code: str) -> str | None:
    """The check of the first engine that asks what a later engine's check asks; None for any other check."""
    from ckptkit.verify.witnesses.registry import ENGINES

    first, *others = ENGINES
    return next((first.codes + code[-1] for one in others if code.startswith(one.codes)), None)


def _code(text: str) -> str:
    """Markdown of a text as it is, backticks too."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def command(check: Any) -> str:
    """The cheapest command that runs a check."""
    from ckptkit.verify.core.check import WITNESS_OPTIONS

    if check.stage == "launch":
        return "ckptkit preflight SCRIPT"
    if check.stage == "deltas":
        return "ckptkit verify DELTAS --source BASE"
    options = ["--source SRC"] if "source" in check.needs else []
    options += [option for need, option in WITNESS_OPTIONS.items() if need in check.needs]
    # Names that the text of a check gives away: it is skipped without them.
    named = {"CK120": "--manifest FILE"}
    named |= dict.fromkeys(("CK602", "CK603"), "--rollout-data FILE")
    return " ".join(["ckptkit verify CKPT", *options, *([named[check.code]] if check.code in named else [])])


def _mutations() -> dict[str, list[str]]:
    """What the tests do to a sound checkpoint, by the code that must find it."""
    sys.path.insert(0, str(ROOT / "tests"))
    from mutations import MUTATIONS

    found: dict[str, list[str]] = {}
    for one in MUTATIONS:
        found.setdefault(one.code, []).append(one.name)
    return {code: list(dict.fromkeys(said)) for code, said in found.items()}


def _symptoms() -> dict[str, list[tuple[str, str]]]:
    """The numbers and words of docs/symptoms.md, by code."""
    from ckptkit.verify.triage.symptom import page_symptoms

    found: dict[str, list[tuple[str, str]]] = {}
    for row in page_symptoms():
        for code in row.codes:
            found.setdefault(code, []).append((row.number[1:], row.title))
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
