"""Why a reader does what `lint` and CK302 say: the reason is that of the reader, with the entry that is its cause."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.published import QWEN, packed, quantization, write

from ckptkit.core.specs import TensorSpec
from quant.lint.lint import lint
from quant.selection.readers import SGLANG, VLLM
from quant.selection.tree import class_tree
from verify.evidence.agreement import agreement

CONFIG = QWEN | {"num_hidden_layers": 2}
ROUTER, HEAD, EMBEDDING = r"re:.*\.mlp\.gate(\.weight)?$", "lm_head", "model.embed_tokens"
GATES = [f"model.layers.{layer}.mlp.gate" for layer in (0, 1)]
QKV = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
OUTPUT = "model.layers.0.self_attn.o_proj"
NEVER, NO_ENTRY = "no quantized layer for it, whatever the list contains", "no entry covers it"
BY_CLASS = ("compressed-tensors", "transformers")


def stored(unpacked: Sequence[str], more: Sequence[str] = ()) -> list[str]:
    """The names of a release in which all but these Linear layers are packed, and `more`."""
    tree = class_tree(CONFIG)
    linears = [one for one in sorted({*tree.linears, *more}) if one not in unpacked and one != HEAD]
    plain = [one for one in {*tree.others, HEAD, *unpacked} if one not in more]
    return [*(name for one in linears for name in packed(one)), *(f"{one}.weight" for one in sorted(plain))]


# What is packed beside the list, the list, a reader, the tensor, and the reason by hand. None: it agrees.
CASES: list[tuple[str, Sequence[str], Sequence[str], Sequence[str], str, str, str | None]] = [
    ("packed router", (), GATES, [HEAD, EMBEDDING], "sglang", GATES[0], NEVER),
    ("packed router", (), GATES, [HEAD, EMBEDDING, ROUTER], "sglang", GATES[0], NEVER),
    ("packed router", (), GATES, [HEAD, EMBEDDING], "transformers", GATES[0], NEVER),
    ("packed router", (), GATES, [HEAD, EMBEDDING, ROUTER], "vllm", GATES[0], f"'{ROUTER}' covers it"),
    ("packed router", (), GATES, [HEAD, EMBEDDING], "vllm", GATES[0], None),
    ("packed router", (), GATES, [HEAD, EMBEDDING, ROUTER], "slime", GATES[0], f"'{ROUTER}' covers it"),
    ("packed embedding", (), [EMBEDDING], [HEAD, ROUTER], "sglang", EMBEDDING, NEVER),
    ("packed embedding", (), [EMBEDDING], [HEAD, ROUTER], "vllm", EMBEDDING, NEVER),
    ("packed embedding", (), [EMBEDDING], [HEAD, ROUTER], "slime", EMBEDDING, None),
    ("sound router", (), (), [HEAD, EMBEDDING, ROUTER], "sglang", GATES[0], None),
    ("router unlisted", (), (), [HEAD, EMBEDDING], "vllm", GATES[0], NO_ENTRY),
    ("router unlisted", (), (), [HEAD, EMBEDDING], "slime", GATES[0], NO_ENTRY),
    ("router unlisted", (), (), [HEAD, EMBEDDING], "sglang", GATES[0], None),
    ("router unlisted", (), (), [HEAD, EMBEDDING], "transformers", GATES[0], None),
    ("plain o_proj", [OUTPUT], (), [HEAD, EMBEDDING, ROUTER], "sglang", OUTPUT, NO_ENTRY),
    ("plain o_proj", [OUTPUT], (), [HEAD, EMBEDDING, ROUTER], "vllm", OUTPUT, NO_ENTRY),
    ("plain o_proj", [OUTPUT], (), [HEAD, EMBEDDING, ROUTER], "transformers", OUTPUT, NO_ENTRY),
    ("plain o_proj", [OUTPUT], (), [HEAD, EMBEDDING, ROUTER, OUTPUT], "vllm", OUTPUT, None),
    ("packed o_proj", (), (), [HEAD, EMBEDDING, ROUTER, OUTPUT], "sglang", OUTPUT, f"'{OUTPUT}' covers it"),
    ("packed o_proj", (), (), [HEAD, EMBEDDING, ROUTER, OUTPUT], "vllm", OUTPUT, f"'{OUTPUT}' covers it"),
    ("packed o_proj", (), (), [HEAD, EMBEDDING, ROUTER, OUTPUT], "transformers", OUTPUT, f"'{OUTPUT}' covers it"),
    ("packed o_proj", (), (), [HEAD, EMBEDDING, ROUTER, OUTPUT], "slime", OUTPUT, f"'{OUTPUT}' covers it"),
    ("q alone", QKV, (), [HEAD, EMBEDDING, ROUTER, QKV[0]], "sglang", QKV[0], f"'{QKV[0]}' covers only a part of it"),
    ("q alone", QKV, (), [HEAD, EMBEDDING, ROUTER, QKV[0]], "vllm", QKV[0], f"'{QKV[0]}' covers only a part of it"),
    ("q alone", QKV, (), [HEAD, EMBEDDING, ROUTER, QKV[0]], "transformers", QKV[1], NO_ENTRY),
    (
        "o by module",
        [OUTPUT],
        (),
        [HEAD, EMBEDDING, ROUTER, "re:.*0.self_attn.o_proj$"],
        "slime",
        OUTPUT,
        "how it reads",
    ),
]


@pytest.mark.parametrize(("what", "unpacked", "more", "ignore", "reader", "module", "reason"), CASES)
def test_the_reason_is_the_readers(
    tmp_path: Path,
    what: str,
    unpacked: Sequence[str],
    more: Sequence[str],
    ignore: Sequence[str],
    reader: str,
    module: str,
    reason: str | None,
) -> None:
    names = stored(unpacked, more)
    report = lint(write(tmp_path, CONFIG, ignore, names), readers=[reader])
    leaf = f"{module.rpartition('.')[2]}.weight"
    found = [
        one.message
        for one in report.findings
        if one.kind in ("disagreement", "exposed") and any(tensor.endswith(leaf) for tensor in one.tensors)
    ]
    assert [reason in message for message in found] == ([] if reason is None else [True]), (what, found)
    specs = {name: TensorSpec(name, (128, 128), "bfloat16") for name in names}
    judged = agreement(specs, CONFIG | {"quantization_config": quantization(ignore)}, [reader])
    errors = [
        issue.actual
        for issue in judged.issues
        if issue.severity == "error" and f"{module.split('.')[-1]}" in issue.actual
    ]
    if reason is not None and errors:
        assert all(reason in actual for actual in errors)


def test_targets_are_the_reason_where_they_name_no_layer(tmp_path: Path) -> None:
    names = stored(())
    ignore, targets = [HEAD, EMBEDDING, ROUTER], [r"re:.*\.(q|k|v)_proj$", "re:.*experts.*", "re:.*qkv_proj"]
    report = lint(write(tmp_path, CONFIG, ignore, names, targets=targets), readers=["vllm", "sglang", "transformers"])
    found = {one.readers: one.message for one in report.findings if any("o_proj" in name for name in one.tensors)}
    assert {readers[0] for readers in found} == {"compressed-tensors", SGLANG[0]}
    assert all("`targets`" in message for message in found.values())
    assert {*BY_CLASS, *VLLM} == set(next(one for one in found if one[0] == "compressed-tensors"))
