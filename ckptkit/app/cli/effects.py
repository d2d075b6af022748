"""Which options of each verb have an effect only beside others, as data. Those not named here always have one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """`options` have an effect only where one of `beside` is given too. Names are those of click's parameters."""

    options: tuple[str, ...]
    beside: tuple[str, ...]
    hint: str


@dataclass(frozen=True)
class Excludes:
    """Of `options` at most one is given: beside it the others would be left unread, or contradict it."""

    options: tuple[str, ...]
    hint: str


Rule = Needs | Excludes

QUANTIZING = (
    *("group_size", "grid", "asymmetric", "search", "scale_dtype", "like", "preset", "tp", "readers", "device"),
    *("ignore", "rounding", "exact"),
)
_MEGATRON = (
    *("vpp", "cp", "pipeline_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "ranks", "trainer_loader"),
)
_GLOBAL = (Excludes(("quiet", "verbose"), "one says less, the other more: give one of them"),)
_SHOWN = Excludes(("every", "as_json"), "--json has every check and all details as it is: leave --all out")
_WRITING = (
    Excludes(("resume", "overwrite"), "--resume goes on with what is there, --overwrite replaces it: give one of them"),
    Excludes(("max_shard_size", "file_bytes"), "--file-bytes is the old name of --max-shard-size: give one of them"),
    Excludes(("like", "preset"), "both say what is packed: give one of them"),
)
_VERIFYING: Sequence[Rule] = (
    Needs(
        _MEGATRON,
        ("against_megatron",),
        "add --against-megatron, or leave it out: files and values do not depend on how Megatron is launched",
    ),
    Needs(("dp_attention",), ("against_sglang",), "add --against-sglang and --tp, or leave it out"),
    Needs(("vllm_python",), ("against_vllm",), "add --against-vllm, or leave it out"),
    Needs(
        ("sglang_python",),
        ("against_sglang", "engine", "update", "release_resume", "rollout_data"),
        "add --against-sglang, --engine or --rollout-data, or leave it out",
    ),
    Needs(("megatron_python",), ("against_megatron",), "add --against-megatron, or leave it out"),
    Needs(("dp_attention",), ("tp",), "add --tp: a single rank keeps attention whole as it is"),
    Needs(("adapter",), ("source",), "add --source BASE, which it was merged into"),
    Needs(("rollout_temperature",), ("rollout_data",), "add --rollout-data FILE, which was sampled at it"),
)

RULES: Mapping[str, Sequence[Rule]] = {
    "convert": (
        *_GLOBAL,
        *_WRITING,
        Needs(
            tuple(name for name in QUANTIZING if name != "tp"),
            ("quantization",),
            "leave it out, or add --quantize w4a16 on the way from Megatron to HF; "
            "`ckptkit quantize` quantizes an HF checkpoint",
        ),
        Needs(
            ("tp",),
            ("quantization",),
            "leave it out: converting needs no parallel sizes, and the output loads at any",
        ),
    ),
    "quantize": (*_GLOBAL, *_WRITING),
    "manifest": _GLOBAL,
    "verify": (*_GLOBAL, _SHOWN, *_VERIFYING),
    "gate": _GLOBAL,
    "preflight": (
        *_GLOBAL,
        _SHOWN,
        Needs(
            ("ckpt_step",),
            ("load", "ref_load", "script", "launch"),
            "add --load or --ref-load, or a launch: an HF directory has no iterations",
        ),
    ),
    "diff": _GLOBAL,
    "doctor": _GLOBAL,
    "explain": _GLOBAL,
    "inspect": _GLOBAL,
    "lint": _GLOBAL,
    "triage": _GLOBAL,
}


def refusal(rules: Sequence[Rule], given: Collection[str], spelled: Mapping[str, str]) -> str | None:
    """Why the options with these names are refused, `spelled` as on the command line; None where each has an effect."""
    for rule in rules:
        named = [spelled[name] for name in rule.options if name in given]
        if isinstance(rule, Excludes):
            if len(named) > 1:
                return f"{' and '.join(named)} exclude each other: {rule.hint}"
        elif named and set(given).isdisjoint(rule.beside):
            needed = " or ".join(spelled[name] for name in rule.beside)
            return f"{', '.join(named)}: no effect without {needed}; {rule.hint}"
    return None
