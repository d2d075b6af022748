"""The pages of lab/cards are what `make cards` writes, and they agree with the records."""

import pytest
from support.nightly import daily

from releases import cards
from releases.header_only import write
from releases.record import load
from releases.verbs import collecting_as_the_command_line_does


@pytest.fixture(autouse=True)
def _as_the_command_line_does():
    with collecting_as_the_command_line_does():
        yield


@pytest.mark.parametrize("model", daily(cards.MODELS, ("Qwen/Qwen2.5-0.5B-Instruct", "openai/gpt-oss-20b")))
def test_page_of_a_release_is_what_its_headers_give(model):
    page, release = cards.file_of(model).read_text(), load(model)
    assert page == cards.header_only_card(model), "make cards"
    assert f"| tensors | {len(release.tensors_in_order):,} (" in page
    assert f"| size | {release.nbytes:,} bytes |" in page


def test_every_page_is_of_a_release():
    assert {path for path in cards.FOLDER.glob("*.md") if path.name != "index.md"} == set(
        map(cards.file_of, cards.MODELS)
    )
    index = (cards.FOLDER / "index.md").read_text()
    assert all(f"({cards.file_of(model).name})" in index for model in cards.MODELS)


def test_weights_that_are_of_another_release_differ_from_its_page(tmp_path, capsys):
    path = write(load("Qwen/Qwen2.5-1.5B"), tmp_path / "Qwen2.5-0.5B-Instruct")
    assert cards.main([f"Qwen/Qwen2.5-0.5B-Instruct=file://{path}"]) == 1
    assert "\n+| size | 3,087,428,608 bytes |" in capsys.readouterr().out
