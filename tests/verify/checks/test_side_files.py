"""CK706 to CK708: tokenizers, special tokens and templates that do not belong to the weights, by hand-written files."""

import base64
import json
import shutil
from pathlib import Path

import pytest
from support.messages import text_with
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from ckptkit.verify.evidence.side import templates
from ckptkit.verify.witnesses.process.exit_report import ExitReport
from ckptkit.verify.witnesses.runner import Answer

# Of 352 rows: 350 words, and two special tokens behind them.
WORDS = {f"w{number}": number for number in range(350)}
ADDED = [{"id": 350, "content": "<end>", "special": True}, {"id": 351, "content": "<pad>", "special": True}]

TOKENS = {"eos_token": "<end>", "pad_token": {"content": "<pad>"}, "bos_token": None}
TEMPLATE = {"chat_template": "{{ messages }}"}
BEYOND = "352 without 1"


def write(path, file, content):
    (path / file).write_text(json.dumps(content))


def change(path, file, **changes):
    write(path, file, json.loads((path / file).read_text()) | changes)


def tokenizer(**changes):
    return {"model": {"type": "BPE", "vocab": WORDS}, "added_tokens": ADDED} | changes


@pytest.fixture
def hf(fresh):
    path = fresh("qwen2-tied")
    write(path, "tokenizer.json", tokenizer())
    write(path, "tokenizer_config.json", TOKENS | TEMPLATE)
    write(path, "generation_config.json", {"eos_token_id": [350, 3], "pad_token_id": 351})
    change(path, "config.json", eos_token_id=350, pad_token_id=351, bos_token_id=None)
    return path


@pytest.mark.parametrize(("code", "compared"), [("CK706", 1), ("CK707", 6)])
def test_side_files_that_agree_are_silent(code, compared, hf, passes):
    passes(code, hf, compared)


def test_ranks_of_tiktoken_are_token_ids(fresh, alone):
    path = fresh("qwen2-tied")
    file = path / "tiktoken.model"
    lines = [f"{base64.b64encode(str(rank).encode()).decode()} {rank}" for rank in range(353)]
    file.write_text("\n".join(lines[:352]))
    assert alone("CK706", path)[1] == []
    file.write_text("\n".join(lines))
    (finding,) = alone("CK706", path)[1]
    assert finding.file == str(file)
    file.write_text("not a rank")
    (finding,) = alone("CK706", path)[1]
    assert "tiktoken" in finding.actual


@pytest.mark.parametrize(
    ("code", "file", "content", "actual"),
    [
        ("CK706", "tokenizer.json", tokenizer(added_tokens=[{"id": 352, "content": "<new>"}]), BEYOND),
        ("CK706", "tokenizer.json", tokenizer(model={"type": "Unigram", "vocab": [["w", -1.0]] * 353}), BEYOND),
        ("CK706", "tokenizer_config.json", {"added_tokens_decoder": {"352": {"content": "<new>"}}}, BEYOND),
        ("CK706", "vocab.json", {"a": 0, "b": 352}, BEYOND),
        ("CK706", "added_tokens.json", {"<new>": 352}, BEYOND),
        ("CK706", "added_tokens.json", {"<end>": 349}, "'<end>' 349 350"),
        ("CK706", "tokenizer.json", [], "tokenizer.json"),
        ("CK706", "tokenizer.json", tokenizer(added_tokens=[{"id": "350", "content": "<end>"}]), "350 whole"),
        ("CK707", "generation_config.json", 7, "generation_config.json"),
    ],
)
def test_a_token_id_beyond_the_embedding_and_a_file_that_cannot_be_read_are_found(
    code, file, content, actual, hf, alone
):
    write(hf, file, content)
    (finding,) = alone(code, hf)[1]
    assert finding.actual == text_with(actual)
    if actual == BEYOND:
        assert (finding.expected, finding.file) == (text_with("352 rows"), str(hf / file))


@pytest.mark.parametrize(
    ("file", "changes", "severity", "expected", "actual"),
    [
        ("generation_config.json", {"eos_token_id": [3, 5]}, "error", "eos_token_id 350", "3 or 5"),
        ("tokenizer_config.json", {"eos_token": "w7"}, "warning", "eos_token_id 3 or 350", "7"),
        ("tokenizer_config.json", {"pad_token": "w7"}, "warning", "pad_token_id 351", "7"),
        # The one that is outvoted is the one at fault, whichever file it is.
        ("config.json", {"eos_token_id": 9}, "error", "eos_token_id 3 or 350", "9"),
        # A file with an id beyond the embedding is blamed alone.
        ("config.json", {"eos_token_id": 500}, "error", "eos_token_id below 352", "eos_token_id 500"),
        ("generation_config.json", {"eos_token_id": [350, 352]}, "error", "eos_token_id below 352", "eos_token_id 352"),
        ("generation_config.json", {"eos_token_id": [350, -7]}, "error", "eos_token_id below 352", "eos_token_id -7"),
        ("config.json", {"eos_token_id": True}, "error", "eos_token_id", "eos_token_id True"),
        ("config.json", {"eos_token_id": {"id": 350}}, "error", "eos_token_id", "eos_token_id {'id'"),
        ("tokenizer_config.json", {"eos_token": "<|im_end|>"}, "error", "eos_token vocabulary", "'<|im_end|>'"),
    ],
)
def test_special_tokens_that_disagree_are_found(file, changes, severity, expected, actual, hf, alone):
    change(hf, file, **changes)
    (finding,) = alone("CK707", hf)[1]
    assert (finding.severity, finding.file) == (severity, str(hf / file))
    assert finding.expected == text_with(expected)
    assert finding.actual.startswith(actual)


@pytest.mark.parametrize(
    ("generated", "token", "severity", "actual"),
    [
        (3, "w7", "error", "9 in config.json, 3 in generation_config.json, 7 in tokenizer_config.json"),
        (None, "w7", "warning", "9 in config.json, 7 in tokenizer_config.json"),
    ],
)
def test_special_tokens_without_a_majority_name_every_file(generated, token, severity, actual, hf, alone):
    change(hf, "config.json", eos_token_id=9)
    change(hf, "generation_config.json", eos_token_id=generated)
    change(hf, "tokenizer_config.json", eos_token=token)
    (finding,) = alone("CK707", hf)[1]
    assert (finding.severity, finding.expected, finding.actual) == (severity, text_with("eos_token_id in all"), actual)


@pytest.mark.parametrize(
    ("changes", "is_lost"),
    [
        ({"tokenizer_config.json": {"eos_token": "w3"}, "generation_config.json": {"eos_token_id": 3}}, True),
        ({"tokenizer_config.json": {"eos_token": "w3"}}, False),  # generation_config.json has it
        ({"generation_config.json": {"eos_token_id": 350}}, False),  # 3 is lost, which no template writes
        ({"tokenizer_config.json": {"chat_template": "x"}, "generation_config.json": {"eos_token_id": 3}}, False),
    ],
)
def test_end_of_the_source_that_the_template_writes_is_an_end(changes, is_lost, hf, tmp_path, alone):
    """A merge that keeps the template, and ends where texts end and not where a turn does."""
    change(hf, "tokenizer_config.json", chat_template="{{ messages }}<end>")
    change(hf, "config.json", eos_token_id=[350, 3])
    source = shutil.copytree(hf, tmp_path / "source")
    for file, changed in changes.items():
        change(hf, file, **changed)
    _, found = alone("CK707", hf, source_path=source)
    lost = [("warning", text_with("eos_token_id template"))]
    assert [(one.severity, one.expected) for one in found] == (lost if is_lost else [])
    assert alone("CK707", hf)[1] == []


def test_the_end_that_the_template_writes_is_right(hf, alone):
    change(hf, "tokenizer_config.json", chat_template="{{ messages }}<end>")
    for file in ("config.json", "generation_config.json"):
        change(hf, file, eos_token_id=3)
    (finding,) = alone("CK707", hf)[1]
    assert (finding.file, finding.actual) == (str(hf / "generation_config.json"), "3")
    assert finding.expected == text_with("eos_token_id 350")


def test_files_that_are_silent_leave_a_token_to_others(hf, alone):
    """A pad_token_id of -1 means none; special_tokens_map.json counts where the config has no token."""
    write(hf, "tokenizer_config.json", {})
    for file in ("config.json", "generation_config.json"):
        change(hf, file, pad_token_id=-1)
    assert alone("CK707", hf)[1] == []
    write(hf, "special_tokens_map.json", {"eos_token": {"content": "w7"}})
    (finding,) = alone("CK707", hf)[1]
    assert (finding.severity, finding.actual) == ("warning", "7")


@pytest.fixture
def pair(hf, tmp_path):
    source = tmp_path / "source"
    hf.rename(tmp_path / "here")
    shutil.copytree(tmp_path / "here", source)
    return tmp_path / "here", source


def test_templates_that_were_not_rendered_are_no_fault_of_the_checkpoint(pair, monkeypatch, alone):
    here, source = pair
    change(here, "tokenizer_config.json", chat_template="{{ messages  }}")
    late = Answer[templates.RenderedTemplates]({}, {0: ExitReport(Path(), message="no answer within 60 s")})
    monkeypatch.setattr(templates, "ask", lambda *_: late)
    result, found = alone("CK708", here, source_path=source)
    assert (result.status, found) == ("skipped", [])


@pytest.mark.parametrize(
    ("file", "processor"),
    [("chat_template.json", False), ("processor_config.json", False), ("chat_template.json", True)],
)
def test_a_template_where_tokenizers_do_not_look_is_lost(file, processor, pair, alone):
    """transformers' AutoTokenizer answers the same: chat_template is None."""
    here, source = pair
    change(here, "tokenizer_config.json", chat_template=None)
    for place in pair if processor else ():
        write(place, "preprocessor_config.json", {"size": 2})
    write(here, file, TEMPLATE)
    (finding,) = alone("CK708", here, source_path=source)[1]
    assert (finding.severity, finding.file) == ("error", str(here / file))
    write(source, file, TEMPLATE)  # a processor's copy, with the tokenizer's own
    change(here, "tokenizer_config.json", **TEMPLATE)
    assert alone("CK708", here, source_path=source)[1] == []


def test_a_tokenizer_that_only_one_side_has(pair, alone):
    """The template of the source is in another of its files, and lost with it."""
    here, source = pair
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        (here / name).unlink(missing_ok=True)
    found = {Path(one.file or "").name: one for one in alone("CK708", here, source_path=source)[1]}
    lost = found["tokenizer.json"]
    assert (lost.actual, lost.count, lost.severity) == ("missing", 352, "error")
    added = {Path(one.file or "").name: one.severity for one in alone("CK708", source, source_path=here)[1]}
    assert added == {"tokenizer.json": "warning", "tokenizer_config.json": "error"}
    assert alone("CK708", source) == (None, [])


END, OWN, NORMALIZER = {"eos_token_id": 2}, "chat_template.jinja", "normalizer.json"
GENERATION, TOKENIZER, SIZE = (
    "generation_config.json",
    "tokenizer_config.json",
    {"preprocessor_config.json": {"size": 2}},
)
COMPARED = {
    # Files of the checkpoint, files of its source, and what is found. transformers v5 writes a template of its own.
    "template in another file": ({TOKENIZER: TOKENS, OWN: "{{ messages }}"}, {}, []),
    "template of no processor": ({}, {"chat_template.json": TEMPLATE}, []),
    "template of a processor": (SIZE, {**SIZE, "chat_template.json": TEMPLATE}, [("error", TOKENIZER)]),
    "top_p": ({GENERATION: END | {"top_p": 0.0}}, {GENERATION: END}, [("error", GENERATION)]),
    "cache": ({GENERATION: END | {"use_cache": False}}, {GENERATION: END}, [("warning", GENERATION)]),
    "file that a tokenizer reads": ({NORMALIZER: '{ "a":"b" }'}, {NORMALIZER: {"a": "b"}}, []),
    "such a file lost": ({}, {NORMALIZER: {"a": "b"}}, [("warning", NORMALIZER)]),
    "such a file changed": ({NORMALIZER: {"a": "c"}}, {NORMALIZER: {"a": "b"}}, [("error", NORMALIZER)]),
}


@pytest.mark.parametrize("what", COMPARED)
def test_files_are_compared_with_those_of_the_source(what, pair, alone):
    *sides, expected = COMPARED[what]
    for path, files in zip(pair, sides, strict=True):
        for file, content in files.items():
            (path / file).write_text(content if isinstance(content, str) else json.dumps(content))
    here, source = pair
    found = alone("CK708", here, source_path=source)[1]
    assert [(one.severity, Path(one.file or "").name) for one in found] == expected


@pytest.fixture
def own_class(hf):
    """Words of bytes, as in the tokenizer.json of Qwen2; of its own model_type transformers knows better names."""
    write(hf, "config.json", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    (hf / "tokenizer.model").unlink(missing_ok=True)
    made = Tokenizer(models.BPE({char: at for at, char in enumerate(sorted(ByteLevel.alphabet()))}, []))
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    made.save(str(hf / "tokenizer.json"))
    return hf


@pytest.mark.parametrize(
    ("name", "asked", "severities"),
    [
        ("LlamaTokenizerFast", (), ["error"]),
        ("XLMRobertaTokenizer", (), []),  # transformers 5 takes the file as it is under this model_type
        ("GPT2Tokenizer", ("transformers",), []),
        ("Qwen2Tokenizer", (), None),
    ],
)
def test_the_class_of_a_tokenizer_takes_its_file(name, asked, severities, own_class, alone):
    write(own_class, "tokenizer_config.json", {"eos_token": "<end>", "tokenizer_class": name})
    result, found = alone("CK732", own_class, against=frozenset(asked))
    assert (None if result is None else [one.severity for one in found]) == severities
    if found:
        (finding,) = alone("CK732", own_class, source_path=own_class, against=frozenset(asked))[1]
        assert finding.severity == "warning"


def test_no_tokenizer_is_a_warning_and_an_error_beside_a_source_that_has_one(releases, fresh, converted, alone):
    """Settings are none: of them transformers makes a tokenizer that encodes a text as nothing. Megatron needs none."""
    path = fresh("qwen2-tied")
    (path / "tokenizer.model").unlink()
    assert AutoTokenizer.from_pretrained(path)("hello world")["input_ids"] == []
    for asked in ((), ("sglang",), ("engine",)):  # both start SGLang without a tokenizer
        (finding,) = alone("CK720", path, against=frozenset(asked))[1]
        assert (finding.severity, finding.actual) == ("warning", text_with("no tokenizer file"))
        assert "--skip-tokenizer-init" in finding.hint
    (finding,) = alone("CK720", path, source_path=releases("qwen2-tied"))[1]
    assert (finding.severity, finding.hint) == ("error", text_with(f"{releases('qwen2-tied')}"))
    assert alone("CK720", path, source_path=path)[1][0].severity == "warning"
    assert alone("CK720", converted("qwen2-tied")) == (None, [])
    for file in ("tokenizer.json", "tiktoken.model", "vocab.txt", "tekken.json"):
        (path / file).touch()
        assert alone("CK720", path)[1] == []
        (path / file).unlink()
