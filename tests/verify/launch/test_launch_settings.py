"""YAML, Hydra overrides and interpolation as they are read: right values with their lines, and limits."""

import itertools
from pathlib import Path

import pytest
from support.messages import text_with

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.launch.job import Launch
from ckptkit.verify.launch.settings.config import Config, UnresolvedError
from ckptkit.verify.launch.settings.files import compose
from ckptkit.verify.launch.settings.overrides import apply_overrides
from ckptkit.verify.launch.settings.tree import flat_settings, parse_yaml, read_yaml
from ckptkit.verify.launch.stacks.which import read_job
from ckptkit.verify.launch.words import LaunchText, Word

TEXT = """
a: 1
b: {c: "${a}", d: [1, 2], e: "${.c}/${oc.env:NAME}", f: "${mul:${a}, ${b.d[1]}}"}
base: &base {k: 1, l: null}
more: {<<: *base, k: 2}
node: ${base}
"""


def config(text=TEXT):
    tree = parse_yaml(text, Path("job.yaml"))
    return Config(tree, {"NAME": "x"})


def test_a_key_has_its_value_and_its_line_or_nothing():
    expected = {"a": ("1", 2), "b.c": ("1", 3), "b.d.1": ("2", 3), "b.e": ("1/x", 3), "b.f": ("2", 3)}
    expected |= {"more.k": ("2", 5), "node.k": ("1", 4)}
    for key, (text, line) in expected.items():
        assert config().find(key) == Word(text, Path("job.yaml"), line)
    assert [config().find(key) for key in ("z", "b.z", "a.z", "more.l", "b.d.7")] == [None] * 5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("${add:1,2}", "3"),
        ("${div:1,2}", "0.5"),
        ("${max:3,${a}}", "3"),
        ("${oc.select:z,7}", "7"),
        ("${oc.env:NO_SUCH,'d e'}", "d e"),
        ("x${a}y${a}", "x1y1"),
    ],
)
def test_resolvers_give_what_omegaconf_gives(value, text):
    assert config(f'a: 1\nv: "{value}"\n').find("v") == Word(text, Path("job.yaml"), 2)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("${z}", "${z}"),
        ("${v}", "itself"),
        ("${oc.env:NO_SUCH}", "the variable NO_SUCH is not set"),
        ("${mul:a,2}", "number"),
        ("${now:%Y}", "resolver now"),
        ("${a", "brace"),
        ("x${m}", "single"),
        ("???", "launch"),
    ],
)
def test_what_cannot_be_resolved_says_why(value, why):
    with pytest.raises(UnresolvedError) as raised:
        config(f'a: 1\nm: {{n: 1}}\nv: "{value}"\n').find("v")
    assert str(raised.value) == text_with(why)


ALIASES = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "\n".join(
    f"{one}: &{one} [{', '.join([f'*{before}'] * 10)}]" for before, one in itertools.pairwise("abcdefg")
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 5000, "more than 64 levels"),
        ("a: " + "{b: " * 5000, "more than 64 levels"),
        ("a: 1\na: 2\n", "2.*mapping"),
        ("a: *b\n", "undefined alias.*line 1"),
        ("a: !!bool x\n", "x.*tag"),
        ("a: &a [*a]\n", "aliases expanded"),
        ("a: 1\n---\nb: 2\n", "single document.*line 2"),
        ("a: [\n", "while parsing"),
        ("<<: 3\n", "mapping"),
        (ALIASES, "more than 50000 values"),
    ],
)
def test_yaml_that_is_not_read_is_refused(text, why):
    with pytest.raises(CkptkitError, match=why):
        parse_yaml(text, Path("job.yaml"))
    assert parse_yaml("a: !!python/object/apply:os.system ['false']\n") == {"a": [Word("false")]}


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"- 1\n", "mapping"), (b"a: \xff\n", "not UTF-8"), (b"#" * (1 << 21), "at most 1048576 are")],
)
def test_a_file_that_is_no_configuration_is_refused(data, why, tmp_path):
    (tmp_path / "a.yaml").write_bytes(data)
    with pytest.raises(CkptkitError, match=why):
        read_yaml(tmp_path / "a.yaml")
    with pytest.raises(CkptkitError, match="No such file"):
        read_yaml(tmp_path / "b.yaml")


def test_defaults_lists_are_composed_in_their_order(tmp_path):
    (tmp_path / "group").mkdir()
    (tmp_path / "first.yaml").write_text("x: 1\ny: 1\nz: {p: 1, q: 1}\n")
    (tmp_path / "group" / "one.yaml").write_text("size: 4\n")
    file = tmp_path / "job.yaml"
    file.write_text(
        "defaults:\n  - first\n  - _self_\n  - group@deep.er: one\n  - group: one\n"
        "  - optional gone: two\n  - sub: null\n"
        "y: 2\nz: {q: 2}\n"
    )
    composed = compose(file)
    expected = {"x": "1", "y": "2", "z.p": "1", "z.q": "2", "deep.er.size": "4", "group.size": "4"}
    assert {key: word.text for key, word in flat_settings(composed.tree)} == expected
    assert [word.text for word in composed.absent] == ["two"]


def test_words_that_choose_a_file_of_a_group_are_told_apart():
    tree, groups = apply_overrides({"a": Word("1")}, [Word("actor@a.b=megatron"), Word("a=3")])
    assert (tree["a"].text, [word.text for word in groups]) == ("3", ["actor@a.b=megatron"])


@pytest.mark.parametrize(("word", "chosen"), [("policy=small", True), ("+size=big", True), ("seed=big", False)])
def test_choice_of_a_file_of_a_group_is_not_known(word, chosen, tmp_path):
    (tmp_path / "size").mkdir()
    (tmp_path / "size" / "big.yaml").write_text("policy: {model_name: /models/big}\n")
    config = tmp_path / "job.yaml"
    config.write_text("seed: 1\npolicy: {model_name: /models/small}\ncluster: {gpus_per_node: 8, num_nodes: 1}\n")
    job = read_job(Launch(LaunchText((Word(word),))), config)
    assert any(line == text_with(f"{word} file group") for line in job.unread) is chosen
