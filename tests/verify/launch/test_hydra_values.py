"""Values of overrides, as Hydra 1.3.8 and OmegaConf 2.3.1 printed them; what Hydra refuses is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verify.launch.job import Launch
from verify.launch.settings.config import Config, Tree, UnresolvedError
from verify.launch.settings.overrides import applied, hydra_value
from verify.launch.stacks.which import read_job
from verify.launch.words import LaunchText, UnresolvedWord, Word

# The text behind `a=`, and what `compose(overrides=["a=..."])` had as `a`.
TAKEN: list[tuple[str, Any]] = [
    ("{b: 'x,y'}", {"b": "x,y"}),
    ("{a:b:c}", {"a": "b:c"}),
    ("{}", {}),
    ("[a,b,'c d']", ["a", "b", "c d"]),
    (r"'it\'s'", "it's"),
    (r"x\,y", "x,y"),
    (r"\{x\}", "{x}"),
    (" x ", "x"),
    ("${b}/c", "${b}/c"),
    ("hf://x", "hf://x"),
    (r'"a\\b"', r"a\\b"),
    (r"'\\'", "\\"),
    ("\"{'x':1}\"", "{'x':1}"),
    ("null", "null"),
]
# Hydra stops at these, makes several jobs of them, or calls a function.
REFUSED = [
    "{'b':1}",
    "[0]*3",
    "a,b",
    "x=y",
    "{b}",
    "x[0]",
    "x#y",
    "[1,2",
    "{b:1",
    "{b:1}x",
    r"a\'b",
    '"x" y',
    "é",
    "x;y",
]
CALLED = ["range(1,3)", "choice(1,2)", "int(3)"]


def plain(tree: Tree) -> Any:
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return [plain(one) for one in tree] if isinstance(tree, list) else tree.text


@pytest.mark.parametrize(("text", "value"), TAKEN)
def test_value_is_what_hydra_makes_of_it(text: str, value: Any) -> None:
    found = hydra_value(text, Word(f"a={text}", Path("run.sh"), 3))
    assert plain(found) == value
    assert not isinstance(found, UnresolvedWord)
    assert not isinstance(found, Word) or found.place == "run.sh:3"


@pytest.mark.parametrize("text", [*REFUSED, *CALLED])
def test_value_that_hydra_refuses_is_not_known(text: str) -> None:
    found = hydra_value(text, Word(f"a={text}"))
    assert isinstance(found, UnresolvedWord)
    assert "Hydra does not take this value" in found.why
    with pytest.raises(UnresolvedError, match="Hydra does not take this value"):
        Config(applied({}, [Word(f"a.b={text}")])[0]).find("a.b")


@pytest.mark.parametrize(("word", "chosen"), [("policy=small", True), ("+size=big", True), ("seed=big", False)])
def test_choice_of_a_file_of_a_group_is_not_known(word: str, chosen: bool, tmp_path: Path) -> None:
    """A section that another file replaces, and a folder beside the file of settings; `seed` is neither."""
    (tmp_path / "size").mkdir()
    (tmp_path / "size" / "big.yaml").write_text("policy: {model_name: /models/big}\n")
    config = tmp_path / "job.yaml"
    config.write_text("seed: 1\npolicy: {model_name: /models/small}\ncluster: {gpus_per_node: 8, num_nodes: 1}\n")
    job = read_job(Launch(LaunchText((Word(word),))), config)
    assert any(f"{word}: the file of this group is not read" in line for line in job.unread) is chosen
