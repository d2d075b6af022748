"""Finds what a launch says that matters and is not read: other paths and sizes, files and overrides of settings."""

from __future__ import annotations

import re
from collections.abc import Sequence

from verify.launch.options.argv import options_of
from verify.launch.options.layout import READ
from verify.launch.options.tables import GPUS
from verify.launch.words import Word

# Hydra's overrides of a configuration of no stack that is known: `actor.rollout.tp_size=4`, `+a.b=c`, `~a.b`.
_OVERRIDE = re.compile(r"(?:[+~]{1,2}\w[\w@/:-]*(?:\.[\w@/:-]+)*(?:=|$)|[A-Za-z_][\w@/:-]*(?:\.[\w@/:-]+)+=)")
# What an override or an option sets that the checks of a launch look at.
_MATTERS = re.compile(
    r"parallel_size|(?:^|[._+])(?:tp|pp|ep|etp|vpp)(?:_size)?$|load|checkpoint|ckpt|model\.path|model_path|layout|"
    r"virtual_pipeline|num_layers"
)
_SIZE = re.compile(r"--(?:.*-)?(?:parallel-size|(?:tp|pp|ep|etp|vpp)(?:-size)?)")
# Sizes that cut no weight, and those that slime and miles overwrite by --rollout-num-gpus-per-engine.
_HARMLESS = frozenset(
    {
        *("--context-parallel-size", "--sglang-data-parallel-size", "--sglang-moe-data-parallel-size"),
        *("--sglang-tp-size", "--sglang-tensor-parallel-size"),
    }
)
_PATHS = frozenset({"--hf-checkpoint", "--load", "--ref-load", "--ckpt-step"})
# Looked at where a launch gives them; preflight has no options for these.
_FROM_WORDS = frozenset({"--ref-ckpt-step", "--critic-load", "--opd-teacher-load", "--opd-teacher-ckpt-step"})
_OTHER_PATHS = frozenset({"--pretrained-checkpoint", "--lora-adapter-path"})
_FILES = frozenset(
    {
        *("--config", "--config-path", "--config-name", "--custom-config-path", "--megatron-config-path"),
        *("--sglang-config", "--yaml-cfg"),
    }
)


def overrides(words: Sequence[str]) -> list[str]:
    """The words that have the form of a Hydra override."""
    return [word for word in words if _OVERRIDE.match(word)]


def unread(words: Sequence[str], given: frozenset[str]) -> list[str]:
    """A line for everything among the words of a launch that matters and is not read.

    `given`: options for paths that preflight was given itself.
    """
    lines: dict[str, None] = {}
    for option in options_of([Word(word) for word in words]):
        name = option.name
        shown = f"{name} {option.value.text}" if option.value else name
        usual = name.replace("_", "-")
        if usual in _PATHS and usual not in given:
            lines[f"{shown}: give it to preflight itself, before --"] = None
        elif usual in _OTHER_PATHS or (usual in _FROM_WORDS and usual not in given):
            lines[f"{shown}: what it names is not looked at; verify it by itself"] = None
        elif usual in _FILES:
            lines[f"{shown}: the settings of this file are not read"] = None
        elif name not in READ and name not in GPUS and _SIZE.fullmatch(usual) and usual not in _HARMLESS:
            lines[f"{shown}: no parallel size that is read"] = None
    left = overrides(words)
    matter = [word for word in left if _MATTERS.search(word.partition("=")[0])]
    lines |= {f"{word}: an override of a configuration file": None for word in matter}
    if rest := [word for word in left if word not in matter]:
        what = f"{len(left) - len(matter)} {'other ' if matter else ''}override{'s' * (len(rest) > 1)}"
        lines[f"{what} of a configuration file, such as {rest[0]}"] = None
    return list(lines)
