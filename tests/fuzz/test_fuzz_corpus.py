"""Every parser returns, or refuses in words, its corpus of fuzzing and the hostile files of all parsers."""

import pytest
from hostile.json_cases import TEXTS
from hostile.texts import LOGS, YAML
from hostile.weights import PICKLES, RAW, ZIPS, _zip

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.torch_dist.foreign_names import refuse_foreign_names
from ckptkit.verify.witnesses.rollouts.recorded import read_recording
from fuzz.run import CORPUS
from fuzz.targets import TARGETS

_SMALL = 20_000  # bytes: larger ones are for the verbs
_TABLES = (TEXTS, RAW, PICKLES, ZIPS, YAML, LOGS, {name: _zip(one) for name, one in PICKLES.items()})
HOSTILE = [content for table in _TABLES for content in table.values() if len(content) < _SMALL]


def test_every_target_has_a_corpus():
    assert sorted(TARGETS) == sorted(folder.name for folder in CORPUS.iterdir())


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_returns_or_refuses_every_input_of_its_corpus(name, tmp_path):
    inputs = [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]
    assert inputs
    unit = TARGETS[name].make(tmp_path)
    for content in (*inputs, *HOSTILE):
        for data in (content, content[: len(content) // 2], content[:-1]):
            unit(data)


@pytest.mark.parametrize(
    ("file", "parse"), [("rollout.pt", read_recording), (".metadata", lambda file: refuse_foreign_names(file.parent))]
)
def test_other_parsers_refuse_hostile_files_in_words(file, parse, tmp_path):
    refused = 0
    for content in HOSTILE:
        (tmp_path / file).write_bytes(content)
        try:
            parse(tmp_path / file)
        except CkptkitError:
            refused += 1
    assert refused > len(HOSTILE) // 2
