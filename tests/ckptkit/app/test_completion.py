"""What a shell offers behind TAB, through click's own completion and the script that docs/index.md has a shell read."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from ckptkit.app.cli import cli

VARIABLE = "_CKPTKIT_COMPLETE"
PAGE = Path(__file__).resolve().parents[3] / "docs/index.md"


def offered(*words: str) -> list[tuple[str, str]]:
    """Kind and value of what completes the last of these words."""
    completion = BashComplete(cli, {}, "ckptkit", VARIABLE)
    return [(one.type, one.value) for one in completion.get_completions(list(words[:-1]), words[-1])]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ver"], [("plain", "verify")]),
        (["verify", "--against"], [("plain", "--against-megatron"), ("plain", "--against-sglang")]),
        (["convert", "a", "b", "--dialect", ""], [("plain", "mcore"), ("plain", "slime"), ("plain", "hybrid")]),
        (["convert", "qwen"], [("file", "qwen")]),
        (["preflight", "run"], [("file", "run")]),
        (["absent", "--"], [("plain", "--version"), ("plain", "--quiet"), ("plain", "--verbose")]),
    ],
)
def test_verb_option_value_or_file_is_completed(words: list[str], expected: list[tuple[str, str]]) -> None:
    assert offered(*words)[: len(expected)] == expected


def test_line_that_would_be_refused_is_completed_all_the_same() -> None:
    """Behind --group-size comes --quantize, without which it is refused."""
    assert offered("convert", "a", "b", "--group-size", "32", "--qu") == [("plain", "--quantize"), ("plain", "--quiet")]


def test_bash_takes_the_script_that_the_page_has_it_read() -> None:
    assert f'eval "$({VARIABLE}=bash_source ckptkit)"' in PAGE.read_text()
    script = BashComplete(cli, {}, "ckptkit", VARIABLE).source()
    said = subprocess.run(["bash", "-c", f"{script}\ncomplete -p ckptkit"], capture_output=True, text=True, check=True)
    assert said.stdout == "complete -o nosort -F _ckptkit_completion ckptkit\n"
