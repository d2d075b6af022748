"""Regular expressions of `ignore` lists: the verdict is that of Python, and what could run for long is refused."""

import re
import time
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import published
from support.messages import refusal

from ckptkit.converters.registry import FAMILIES
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.engines.sglang import CLASSES
from ckptkit.quant.patterns import MAX_COSTLY, MAX_NAME, check_entries, check_lookups, matcher

# Beside those of `published` and the families.
RECIPES = tomllib.loads((Path(__file__).parent / "ignore" / "entries.toml").read_text())["recipes"]
LISTS = [published.KIMI_LIST, published.QWEN_LIST, published.GLM_RULES, published.GLM_LIST, published.MINIMAX_LIST]
LISTS += [entries for one in FAMILIES.values() if one.release for entries in one.release.published_ignore]
LISTS += [[dense.entry] for known in CLASSES.values() for dense in known.dense]
PUBLISHED = sorted({entry for entries in LISTS for entry in entries})
ATTENTION = ("q_proj", "o_proj", "indexer.weights_proj")
MLP = ("gate", "gate_proj", "gate_up_proj", "experts.0.gate_proj", "shared_experts.down_proj", "shared_expert_gate")
MODULES = [f"self_attn.{one}" for one in ATTENTION] + [f"mlp.{one}" for one in MLP]
NAMES = [
    f"{root}layers.{layer}.{module}{end}"
    for root in ("model.", "model.language_model.", "language_model.model.", "")
    for layer in (0, 3, 12, 60)
    for module in (*MODULES, "mlp.experts.17.down_proj", "block_sparse_moe.gate", "linear_attn.conv1d")
    for end in ("", ".weight", ".weight_packed", "\n")
]
NAMES += ["", "lm_head", "model.embed_tokens", "model.visual.blocks.0.attn.qkv", "vision_tower.a", "aaaa", "aaab"]


def test_published_and_recipe_patterns_match_as_python_does():
    patterns = [*RECIPES, *(entry for entry in PUBLISHED if entry.startswith("re:"))]
    assert len(patterns) > 30
    check_entries([*patterns, *PUBLISHED], "ignore")
    for pattern in patterns:
        python = re.compile(pattern.removeprefix("re:")).match
        expected = [name for name in NAMES if python(name)]
        assert [name for name in NAMES if matcher(pattern, 100)(name)] == expected, pattern
        assert [name for name in NAMES if matcher(pattern)(name)] == expected, pattern
    # What the lists are meant to cover, so that an empty verdict on both sides is none.
    assert matcher("re:^(?!.*experts).*mlp.*proj$")("model.layers.0.mlp.gate_proj")
    assert not matcher("re:^(?!.*experts).*mlp.*proj$")("model.layers.0.mlp.experts.0.gate_proj")
    assert matcher("re:.*mlp.*experts.*gate_proj.*")("model.layers.0.mlp.experts.0.gate_proj.weight")


_CHARACTERS = st.sampled_from(["a", "b", r"\.", "0", r"\n", "é", "A", "_"])
_SINGLE = _CHARACTERS | st.sampled_from([".", r"\d", r"\w", r"\s", r"\W", "[ab]", "[^a]", "[a-c0]", "[^.]"])
_CONDITION = st.sampled_from(["^", "$", r"\b", r"\B", r"\A", r"\Z", "", "(?=a)", "(?!b)", "(?<=a)", r"(?<!\.)"])
_REPETITION = st.sampled_from(["*", "+", "?", "{0,2}", "{2}", "{1,}", "{2,3}", "*?", "+?", "??", "{1,3}?"])


def _larger(inner):
    return st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("(?:{}){}".format, inner, _REPETITION),
        st.builds("{}{}".format, _SINGLE, _REPETITION),
        st.builds("({}{})".format, st.sampled_from(["", "?i:", "?s:", "?m:", "?-i:"]), inner),
        st.builds("(?!{}){}".format, inner, inner),
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.recursive(_SINGLE | _CONDITION, _larger, max_leaves=8),
    st.lists(st.text(st.sampled_from("ab.0\néA_"), max_size=8), min_size=5, max_size=5),
)
def test_random_patterns_match_as_python_does(pattern, names):
    theirs = re.compile(pattern).match
    with suppress(CkptkitError):  # repetitions inside repetitions
        for longest in (8, 201):
            ours = matcher(f"re:{pattern}", longest)
            assert [bool(ours(name)) for name in names] == [bool(theirs(name)) for name in names]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.recursive(_SINGLE | _CONDITION, _larger, max_leaves=8), st.text(st.sampled_from("ab.0"), max_size=5))
def test_random_patterns_that_are_accepted_end_soon(pattern, part):
    with suppress(CkptkitError):
        match = matcher(f"re:{pattern}x")
        before = time.thread_time()  # of the processor, as the program itself measures it
        match((part * MAX_NAME)[:MAX_NAME])
        assert time.thread_time() - before < 5


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a+)+$", "(a|a)*$", "(.*a){20}$", ".*.*.*.*.*x", "(a?){50}a{50}b", "(?!(a+)+c)(a*)*b$", "((a*)*)*b"),
        *("(?:(?:a{1000}){1000}){1000}", "(?:(?:){999999}a){999999}", "(?i:(a|A)*)+b", "(?>(a*)*)b", "x|(a*)*b"),
        *(r"(?:model|layers|\.|\d+)*\.mlp.*", r"model\.(.*\.)*o_proj\Z", r"\((a*)*b", "(a)?(?(1)b|c)", r"(a)\1"),
    ],
)
def test_pattern_that_may_run_for_hours_is_refused(pattern):
    assert refusal("200.*characters", check_entries, [f"re:{pattern}"], "ignore").hint


def test_long_name_is_refused_where_the_pattern_could_run_for_long():
    assert not matcher("re:.*a.*x")("a" * 20_000)
    with pytest.raises(CkptkitError, match="20000"):
        matcher("re:.*a.*a.*x")("a" * 20_000)


def test_pattern_that_takes_long_for_many_names_is_refused():
    match = matcher("re:.*.*.*.*x")
    with pytest.raises(CkptkitError, match=r"re:\.\*\.\*\.\*\.\*x"):
        _ = [match(f"{number:0200b}") for number in range(10_000)]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["re:["], r"re:\["),
        (["re:a**"], "multiple"),
        (["re:a{99999999999999}"], "repetition"),
        (["re:(?<=a+)b"], "requires"),
        (["re:[[a]"], "expression.*Possible"),
        (["re:(?i)[\0-\U0010ffff]"], "expression.*ASCII"),
        (["re:" + "(" * 900 + "a" + ")" * 900], "deeply"),
        (["re:" + "a" * 2_001], "has 2004 characters"),
        (["re:"], "'re:'"),
        ([""], "''"),
        ([["lm_head"]], r"\['lm_head'\]"),
        ([f"re:a{number}" for number in range(1_001)], "1001.*1,000"),
        (["lm_head"] * 100_001, "100001.*100,000"),
        ([f"re:.*.*.*{number}" for number in range(MAX_COSTLY + 1)], "repetitions.*50"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_entry_that_is_none_is_refused(entries, message):
    raised = refusal(message, check_entries, entries, "ignore")
    assert raised.hint
    assert len(raised.message) < 400


def test_too_many_entries_for_the_names_are_refused():
    check_lookups(["re:a"] * 100, 200_000)
    refusal("1001.*100000", check_lookups, ["a"] * 1_001, 100_000)
