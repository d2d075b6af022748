"""Every mutation is found, nothing is found where nothing is wrong, and the registry of mutations is true."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.messages import text_with
from support.nightly import daily

from ckptkit.verify.core.check import all_checks
from ckptkit.verify.core.report import Finding, Report
from mutations import MUTATIONS
from mutations.edits import edit_config
from mutations.mutation import LEVELS, Mutation, clean, level_of, missed, name_of, one_each, run, runs
from mutations.starts import MODELS, Starts, labels

DOCUMENT = Path(__file__).resolve().parents[2] / "lab" / "failure-modes.md"
MODES = [f"F{number}" for number in range(1, 31)]
# What files cannot show, and what is not a defect of a checkpoint.
WITHOUT_MUTATION = {"F11", "F16", "F17", "F26"}
RUNS = runs(MUTATIONS)
NORM = Mutation("test", "F5", "CK702", lambda path, place: None, {"qwen2/hf": "rms_norm_eps"}, with_source=True)


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    return Starts(tmp_path_factory.mktemp("starts"))


@pytest.mark.parametrize("label", labels())
def test_a_clean_one_has_no_finding(label, starts):
    assert clean(label, starts) == []


@pytest.mark.parametrize("case", daily(RUNS, one_each(RUNS)), ids=name_of)
def test_it_is_found(case, starts, tmp_path):
    assert run(*case, starts, tmp_path) is None


def rows():
    """What lab/failure-modes.md says of every mode: what goes wrong, its checks, its mutations."""
    modes = re.split(r"^\*\*(F\d+)\.\*\*", DOCUMENT.read_text(), flags=re.MULTILINE)[1:]
    return {
        mode: [" ".join(part.split()) for part in re.split(r"\n- (?:Checks|Mutations|Reports): ", text)[:3]]
        for mode, text in zip(modes[::2], modes[1::2], strict=True)
    }


def codes(text):
    return set(re.findall(r"CK\d{3}", text))


def test_every_mutation_has_a_name_of_its_own_and_checkpoints_that_exist():
    names = re.findall(r"^(\S.*):$", Path(__file__).with_name("mutations.yaml").read_text(), re.MULTILINE)
    assert len(set(names)) == len(names) == len(MUTATIONS)
    assert [one.name for one in MUTATIONS if not one.on or not set(one.on) <= set(labels())] == []
    assert {label.partition("/")[0] for one in MUTATIONS for label in one.on} == set(MODELS)


def test_a_cheaper_level_is_only_named_where_it_is_not_that_of_the_code():
    """There a dearer check says what is wrong where a cheaper one only says that something is."""
    named = {one.name: one for one in MUTATIONS if one.cheapest}
    assert set(named) == {"both rotary spellings, two bases", "router biases rounded", "whole model in float16"}
    assert all(LEVELS.index(one.level) < LEVELS.index(level_of(one.code)) for one in named.values())


def test_the_document_has_every_mode_once():
    assert list(rows()) == MODES


def test_the_document_names_checks_and_mutations_that_exist():
    registered, names = {check.code for check in all_checks()}, {one.name for one in MUTATIONS}
    for mode, (_, checks, examples) in rows().items():
        assert codes(checks) <= registered, mode
        if mode not in WITHOUT_MUTATION:
            named = [name for name in examples.split("; ") if name in names]
            assert len(named) >= 1, mode
            assert [name for name in examples.split("; ") if name not in names] == [], mode


def test_the_document_names_the_code_of_every_mutation_in_the_rows_of_its_modes():
    found = rows()
    wrong = [
        (one.name, mode, one.code)
        for one in MUTATIONS
        for mode in one.modes.split()
        if mode in WITHOUT_MUTATION or one.code not in codes(found[mode][1])
    ]
    assert wrong == []


def test_every_mode_that_files_can_show_has_a_mutation():
    assert {mode for one in MUTATIONS for mode in one.modes.split()} == set(MODES) - WITHOUT_MUTATION


def test_a_mutation_that_changes_nothing_is_an_error(starts, tmp_path):
    assert run(NORM, "qwen2/hf", starts, tmp_path) == "the mutation changed nothing on disk"


def test_one_that_changes_something_is_found(starts, tmp_path):
    other = replace(NORM, damage=lambda path, place: edit_config(path, rms_norm_eps=1e-3))
    assert run(other, "qwen2/hf", starts, tmp_path) is None


def judged(mutation, *findings):
    return missed(mutation, "rms_norm_eps", Report("0", (), "here", None, [], findings, {}))


def test_what_is_not_found_as_it_should_be_is_missed():
    right = Finding("CK702", "rms_norm_eps = 1e-05", "rms_norm_eps = 0.001", "")
    assert judged(NORM, right) is None
    assert judged(NORM) == "CK702 found nothing; findings are of no check"
    assert judged(NORM, replace(right, code="CK701")) == "CK702 found nothing; findings are of CK701"
    assert "names rms_norm_eps" in (
        judged(NORM, replace(right, expected="rotary_base = 1", actual="rotary_base = 2")) or ""
    )
    assert judged(NORM, replace(right, severity="warning")) == text_with("CK702")
    assert (
        judged(NORM, right, replace(right, code="CK104"))
        == "the level is headers (CK104, CK702), the registry says configuration"
    )
