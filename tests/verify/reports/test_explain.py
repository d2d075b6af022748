"""`explain`: every check says why it matters and what to do."""

import re

import pytest

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.core.catalogue import retired_codes, rows
from ckptkit.verify.core.check import all_checks
from ckptkit.verify.explain import explain
from ckptkit.verify.witnesses.registry import ENGINES


def test_every_check_explains_itself():
    codes = [check.code for check in all_checks()]
    assert codes == sorted(set(codes))
    assert [line.partition(" ")[0] for line in explain().splitlines()[:-2]] == codes
    for check in all_checks():
        text = explain(f" {check.code.lower()} ")
        assert text.splitlines()[0] == f"{check.code}: {check.title}"
        assert len(check.rationale) > 40
        assert len(check.fix) > 20
        assert check.rationale in text
        assert check.fix in text


@pytest.mark.parametrize(
    ("words", "near"),
    [("CK110x", "`ckptkit explain CK110`"), ("garbeld", "`ckptkit explain garbled`"), ("zebra crossing", None)],
)
def test_what_is_not_known_has_the_nearest_known_beside_it(words, near):
    with pytest.raises(CkptkitError) as error:
        explain(words)
    assert repr(words) in error.value.message
    hint = error.value.hint or ""
    assert hint.endswith("`ckptkit explain` lists all checks by code")
    assert near in hint if near else hint.startswith("`ckptkit explain` lists")


def test_a_symptom_is_found_by_its_words_with_the_command_that_tells_its_cause():
    lines = explain("garbled").splitlines()
    at = lines.index("S1     Garbled output at step 1; the server answers 200")
    assert lines[at + 1].strip() == "`ckptkit verify HF --source RELEASE --against-sglang`"
    assert any(line.startswith("S21 ") for line in lines)


@pytest.mark.parametrize(
    ("words", "best"),
    [
        ("oom", "cuda-oom"),
        ("killed", "host-oom"),
        ("nan loss", "S14"),
        ("router Experts", "CK525"),
        ("the model answers garbage", "S1"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "cuda-oom"),
        ("[rank3]: KeyError: 'model.layers.0.mlp.experts.w13_weight_packed'", "S35"),
    ],
)
def test_the_best_match_is_first(words, best):
    lines = explain(words).splitlines()
    assert re.match(r"[\w-]+", lines[0])[0] == best
    assert len(lines) < 25


def test_words_of_users_are_known_and_whole_words_count():
    assert explain("gibberish") == explain("nonsense")
    assert "collective" in explain("hang")
    assert "NaN" in explain("nan zebra"), "unknown words do not count"


def test_a_symptom_by_its_number_says_causes_command_and_checks_and_no_test():
    text = explain("s36")
    assert text.startswith("S36: The loss jumps at the first step after a resume")
    assert "\n\nCauses\n  " in text
    assert "\n\nCommand\n  `ckptkit verify CKPT`" in text
    assert text.endswith("\n\nChecks\n  CK121, CK213, CK214")


def test_every_row_of_the_catalogue_is_of_a_check():
    others = {f"{one.codes}{number}" for one in ENGINES[1:] for number in range(10)}  # worded as the first engine's
    assert rows().keys() - retired_codes() == {one.code for one in all_checks()} - others


def test_a_symptom_of_a_log_is_found_by_a_part_of_its_line_and_by_its_key():
    text = explain("weights were not initialized from checkpoint")
    assert text.splitlines()[0] == "vllm-not-initialized: vLLM found no tensor for parameters of the model"
    assert explain("Weight-Key") == explain("s35")
    assert "\n\nChecks\n" not in explain("host-oom")


def test_a_retired_code_says_in_one_line_what_to_use_and_is_not_used_again():
    assert retired_codes().keys().isdisjoint(check.code for check in all_checks())
    for code, instead in retired_codes().items():
        assert explain(code.lower()) == f"{code}: retired before 0.1.0; {instead}"
