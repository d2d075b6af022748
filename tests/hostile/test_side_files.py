"""Files next to the weights that are not those of the source, and others that only look different."""

import json
import shutil

import pytest
from support.libraries import ask_here
from support.nightly import daily
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from ckptkit.verify.evidence.side.compare import side_differences
from ckptkit.verify.evidence.side_files import SideFiles

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>\n{% endfor %}"
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
SPECIAL = {300: "<|endoftext|>", 301: "<|im_start|>", 302: "<|im_end|>"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def read(path, file):
    return json.loads((path / file).read_text()) if (path / file).exists() else {}


def write(path, file, content):
    (path / file).parent.mkdir(parents=True, exist_ok=True)
    (path / file).write_text(content if isinstance(content, str) else json.dumps(content))


def changed(file, change):
    def apply(path):
        content = read(path, file)
        change(content)
        write(path, file, content)

    return apply


def tokenizer(**changes):
    return changed("tokenizer.json", lambda content: content.update(changes))


def inside(change):
    return changed("tokenizer.json", change)


def settings(file="tokenizer_config.json", /, **changes):
    return changed(file, lambda content: content.update(changes))


def added(file, content="x"):
    return lambda path: write(path, file, content)


def linked(file, target):
    def apply(path):
        (path / target).write_text("y")
        (path / file).unlink(missing_ok=True)
        (path / file).symlink_to(path / target)

    return apply


def lost(*files):
    return lambda path: [(path / file).unlink() for file in files]


def byte_level():
    vocab = {char: number for number, char in enumerate(sorted(ByteLevel.alphabet()))}
    merges = [["h", "e"], ["l", "l"], ["he", "ll"], ["hell", "o"], ["t", "h"], ["o", "r"], ["\u0120", "th"]]
    merges += [["1", "2"], ["12", "3"], ["\u010a", "\u010a"]]
    vocab |= {"".join(pair): len(vocab) + number for number, pair in enumerate(merges)}
    vocab |= {f"<t{number}>": number for number in range(len(vocab), 300)}
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": text, **FLAGS} for number, text in SPECIAL.items()],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, BYTES]},
        "post_processor": BYTES,
        "decoder": BYTES,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.mkdir()
    own = byte_level()
    write(path, "tokenizer.json", own)
    write(path, "vocab.json", own["model"]["vocab"])
    write(path, "merges.txt", "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in own["model"]["merges"]))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "errors": "replace",
        "model_max_length": 512,
        "added_tokens_decoder": {str(number): {"content": text, **FLAGS} for number, text in SPECIAL.items()},
    }
    write(path, "tokenizer_config.json", config)
    write(path, "config.json", {"model_type": "qwen3", "eos_token_id": 302})
    write(path, "src/model.py", "x")
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "eos_token_id": [302, 300]}
    write(path, "generation_config.json", sampling | {"transformers_version": "4.51.0"})
    return path


@pytest.fixture
def compare(source, tmp_path, monkeypatch):
    """`compare(change)`: how a changed copy of the source differs from it."""

    def differences(change):
        ask_here(monkeypatch, tmp_path)
        copy = shutil.copytree(source, tmp_path / "copy")
        change(copy)
        return list(side_differences(SideFiles(copy), SideFiles(source), "in the source"))

    return differences


BEGIN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [301], "tokens": ["<|im_start|>"]}},
}


def replaced(text, content):
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


def swap(content):
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def flag(name, value):
    return inside(lambda content: content["added_tokens"][1].update({name: value}))


def in_split(old, new):
    def change(content):
        pattern = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]
        pattern["Regex"] = pattern["Regex"].replace(old, new)

    return inside(change)


# What a finding names, and what is done to tokenizer.json.
TOKENIZERS = [
    ("pre_tokenizer.type is 'Whitespace' but 'Sequence'", tokenizer(pre_tokenizer={"type": "Whitespace"})),
    ("pre_tokenizer is missing", tokenizer(pre_tokenizer=None)),
    ("Regex", in_split(r"|\p{N}|", r"|\p{N}{1,3}|")),
    (
        "add_prefix_space is True but False",
        inside(lambda content: content["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True)),
    ),
    ("normalizer.type is 'Lowercase' but 'NFC'", tokenizer(normalizer={"type": "Lowercase"})),
    ("normalizer.type is 'Prepend'", tokenizer(normalizer={"type": "Prepend", "prepend": "z"})),
    (
        "normalizer.type is 'Sequence'",
        tokenizer(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, replaced("qzxw", "a")]}),
    ),
    ("decoder.type is 'Fuse' but 'ByteLevel'", tokenizer(decoder={"type": "Fuse"})),
    (
        "decoder.type is 'Sequence'",
        tokenizer(decoder={"type": "Sequence", "decoders": [BYTES, replaced("hello", "bye")]}),
    ),
    ("post_processor.type is 'TemplateProcessing'", tokenizer(post_processor=BEGIN)),
    ("model.merges[0][0] is", inside(lambda content: content["model"]["merges"].reverse())),
    ("2 of the 303 tokens in the source have other ids", inside(swap)),
    ("'<|im_end|>'", inside(lambda content: content["added_tokens"].pop())),
    ("'ball'", inside(lambda content: content["added_tokens"].append({"id": 303, "content": "ball", **FLAGS}))),
    ("special is False but True", flag("special", False)),
    ("lstrip is True but False", flag("lstrip", True)),
    ("model.dropout is 0.9", inside(lambda content: content["model"].update(dropout=0.9))),
]
# A file, words of what a finding says of it, and what is done.
OTHERS = [
    ("tokenizer_config.json", "tokenizer_class is 'LlamaTokenizer'", settings(tokenizer_class="LlamaTokenizer")),
    ("tokenizer_config.json", "add_prefix_space is True but False", settings(add_prefix_space=True)),
    ("tokenizer_config.json", "clean_up_tokenization_spaces", settings(clean_up_tokenization_spaces=True)),
    ("tokenizer_config.json", "eos_token is '<|im_start|>' but '<|im_end|>'", settings(eos_token="<|im_start|>")),  # noqa: S106
    ("tokenizer_config.json", "eos_token is missing but '<|im_end|>'", settings(eos_token=None)),
    ("special_tokens_map.json", "<|im_start|>", added("special_tokens_map.json", {"eos_token": "<|im_start|>"})),
    ("tokenizer_config.json", "'hello'", settings(extra_special_tokens=["hello"])),
    (
        "tokenizer_config.json",
        "lstrip is True but False",
        changed("tokenizer_config.json", lambda content: content["added_tokens_decoder"]["301"].update(lstrip=True)),
    ),
    ("vocab.json", "its content", settings("vocab.json", a=1)),
    ("merges.txt", "its content", added("merges.txt", "#version: 0.2\nl l\nh e\n")),
    ("config.json", "'x.C'", settings("config.json", auto_map={"AutoModel": "x.C"})),
    ("config.json", "'you/repo--x.C'", settings("config.json", auto_map={"AutoModel": "you/repo--x.C"})),
    ("tokenizer_config.json", "'x.T'", settings(auto_map={"AutoTokenizer": ["x.T", None]})),
    ("processor_config.json", "'x.P'", settings("processor_config.json", auto_map={"AutoProcessor": "x.P"})),
    ("src/model.py", "its content", added("src/model.py", "y")),
    ("src/model.py", "its content", linked("src/model.py", "src/other")),
    ("pkg/model.py", "trust_remote_code", lambda path: (path / "pkg").symlink_to("src", target_is_directory=True)),
    ("config.json", "'pkg/evil.Evil'", settings("config.json", auto_map={"AutoModel": "pkg/evil.Evil"})),
    ("config.json", "'pkg.evil.Evil'", settings("config.json", auto_map={"AutoModel": "pkg.evil.Evil"})),
    (
        "processor_config.json",
        "'pkg/x.P'",
        settings("processor_config.json", image_processor={"auto_map": {"AutoImageProcessor": "pkg/x.P"}}),
    ),
    ("config.json", "'pkg/x.V'", settings("config.json", vision_config={"auto_map": {"AutoModel": "pkg/x.V"}})),
    ("generation_config.json", "temperature is 2 but 0.6", settings("generation_config.json", temperature=2)),
    (
        "generation_config.json",
        "top_p is missing but 0.95",
        changed("generation_config.json", lambda content: content.pop("top_p")),
    ),
    (
        "generation_config.json",
        "eos_token_id is 302 but [302, 300]",
        settings("generation_config.json", eos_token_id=302),
    ),
    ("generation_config.json", "missing", lost("generation_config.json")),
    ("tokenizer_config.json", "chat template 'default'", settings(chat_template=TEMPLATE + "x")),
    ("chat_template.jinja", "chat template 'default'", added("chat_template.jinja")),
    ("additional_chat_templates/tool_use.jinja", "'tool_use'", added("additional_chat_templates/tool_use.jinja")),
    (
        "tokenizer_config.json",
        "a question is rendered as",
        settings(chat_template="{% for m in messages %}<|im_start|>{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"),
    ),
    (
        "tokenizer_config.json",
        "separate reasoning",
        settings(chat_template=TEMPLATE.replace("{{ m", "{{ m['thinking'] }}{{ m")),
    ),
    (
        "tokenizer_config.json",
        "a question with a tool is rendered as",
        settings(chat_template="{% if tools %}tools{% endif %}" + TEMPLATE),
    ),
    (
        "tokenizer_config.json",
        "chat template 'rag'",
        settings(chat_template=[{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": "x"}]),
    ),
    ("tokenizer_config.json", "missing", settings(chat_template=None)),
    *(
        (file, "trust_remote_code", added(file))
        for file in ("modeling_x.py", "pkg/evil.py", "custom_generate/more/x.py")
    ),
    *((file, "does not exist", added(file, {"a": 1})) for file in ("added_tokens.json", "tekken.json", "params.json")),
    ("tokenizer.model", "does not exist", added("tokenizer.model")),
]


def saved_again(path):
    AutoTokenizer.from_pretrained(path).save_pretrained(path)
    lost("vocab.json", "merges.txt")(path)


SOUND = {
    "saved by transformers 5": saved_again,
    "other order": lambda path: write(path, "tokenizer.json", json.dumps(read(path, "tokenizer.json"), sort_keys=True)),
    "merges as texts": inside(lambda c: c["model"].update(merges=[" ".join(pair) for pair in c["model"]["merges"]])),
    "defaults left out": inside(lambda c: [c["model"].pop(key) for key in ("dropout", "unk_token", "ignore_merges")]),
    "offsets": inside(lambda c: c["pre_tokenizer"]["pretokenizers"][1].update(trim_offsets=True)),
    "a flag for a normalizer that changes no added token": flag("normalized", True),
    "a token for unknown bytes, of which there are none": inside(lambda c: c["model"].update(unk_token="a")),  # noqa: S106
    "sequence of one": inside(lambda c: c.update(normalizer={"type": "Sequence", "normalizers": [c["normalizer"]]})),
    "decoder as transformers 5 has it": tokenizer(decoder={**BYTES, "add_prefix_space": True, "use_regex": True}),
    "truncation": tokenizer(
        truncation={"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 8},
            "direction": "Left",
            "pad_to_multiple_of": None,
            "pad_id": 300,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        },
    ),
    "class of transformers 4": settings(tokenizer_class="Qwen2TokenizerFast"),
    "special tokens again": added(
        "special_tokens_map.json", {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}}
    ),
    "added tokens again": added("added_tokens.json", {text: number for number, text in SPECIAL.items()}),
    "tokenizer.json only": lost("vocab.json", "merges.txt"),
    "template that renders the same": settings(
        chat_template="{%- for m in messages -%}\n{{ '<|im_start|>' + m.content + '<|im_end|>\\n' }}\n{%- endfor -%}"
    ),
    "version": settings("generation_config.json", transformers_version="5.12.1", _from_model_config=True),
    "defaults of generation": settings("generation_config.json", top_k=50, repetition_penalty=1.0, num_beams=1),
    "files of a trainer": lambda path: [
        write(path, name, "x") for name in ("README.md", "trainer_state.json", "LICENSE", "latest", "train.log")
    ],
    "quantizer": added("hf_quant_config.json", {"quantization": {}}),
    "code of git": added(".git/hooks/x.py"),
    "notes on code": added("pkg/README.md"),
    "code that no auto_map of it names": lost("src/model.py"),
    "linked code": lambda path: [
        (path / "src" / "model.py").rename(path / "notes"),
        (path / "src" / "model.py").symlink_to("../notes"),
    ],
}


def by_day(rows):
    """Every sixth row by day, the others at night."""
    return [row if at % 6 == 0 else pytest.param(*row, marks=pytest.mark.nightly) for at, row in enumerate(rows)]


@pytest.mark.parametrize(("words", "change"), by_day(TOKENIZERS))
def test_another_tokenizer_is_an_error(words, change, compare):
    found = [one for one in compare(change) if one.file == "tokenizer.json"]
    assert [one.severity for one in found] == ["error"], found
    assert words in found[0].words


@pytest.mark.parametrize(("file", "words", "change"), by_day(OTHERS))
def test_another_or_a_new_file_is_an_error(file, words, change, compare):
    found = compare(change)
    assert [(one.file, one.severity) for one in found] == [(file, "error")], found
    assert words in found[0].words


@pytest.mark.parametrize("name", daily(SOUND, list(SOUND)[::6]))
def test_a_file_that_says_the_same_is_no_difference(name, compare):
    assert compare(SOUND[name]) == []


def test_code_outside_the_checkpoint_is_never_the_same(source, tmp_path):
    """transformers joins the directory and the name, and an absolute one is joined to itself."""
    settings("config.json", auto_map={"AutoModel": "/srv/evil.Evil"})(source)
    copy = shutil.copytree(source, tmp_path / "copy")
    (found,) = side_differences(SideFiles(copy), SideFiles(source), "in the source")
    assert (found.severity, found.file, "/srv/evil.Evil" in found.words) == ("error", "config.json", True)


def test_without_the_libraries_values_decide(source, tmp_path, monkeypatch):
    monkeypatch.setattr("ckptkit.verify.evidence.side.texts.find_spec", lambda name: None)
    copy = shutil.copytree(source, tmp_path / "copy")
    tokenizer(pre_tokenizer={"type": "Whitespace"})(copy)
    (found,) = side_differences(SideFiles(copy), SideFiles(source), "in the source")
    assert (found.severity, found.file) == ("error", "tokenizer.json")
    assert "tokenizers" in found.words


def test_equal_files_ask_no_library(source, tmp_path, monkeypatch):
    jobs = ask_here(monkeypatch, tmp_path)
    copy = shutil.copytree(source, tmp_path / "copy")
    assert list(side_differences(SideFiles(copy), SideFiles(source), "in the source")) == []
    inside(swap)(copy)  # ids tell by themselves
    assert [one.count for one in side_differences(SideFiles(copy), SideFiles(source), "in the source")] == [2]
    assert jobs == []


UNIGRAM = {
    "added_tokens": [{"id": 0, "content": "<unk>", **FLAGS}],
    "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": True},
    "decoder": {"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": True},
    "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.0], ["ab", -2.5]]},
}
WORDPIECE = {
    "added_tokens": [{"id": 0, "content": "[UNK]", **FLAGS}],
    "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
    "pre_tokenizer": {"type": "BertPreTokenizer"},
    "post_processor": {"type": "BertProcessing", "sep": ["a", 1], "cls": ["b", 2]},
    "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "model": {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {"[UNK]": 0, "a": 1, "b": 2, "##b": 3},
    },
}
KINDS = [
    ("scores", UNIGRAM, lambda t: t["model"]["vocab"][3].__setitem__(1, -4.0), "model.vocab[3][1] is -4.0 but -2.5"),
    ("order", UNIGRAM, lambda t: t["model"]["vocab"].reverse(), "have other ids"),
    (
        "metaspace",
        UNIGRAM,
        lambda t: t["pre_tokenizer"].update(add_prefix_space=False),
        "add_prefix_space does not match",
    ),
    ("case", WORDPIECE, lambda t: t["normalizer"].update(lowercase=False), "normalizer.lowercase is False but True"),
    ("ends", WORDPIECE, lambda t: t.update(post_processor=None), "post_processor is missing"),
    ("other sides", WORDPIECE, lambda t: t["post_processor"].update(sep=["b", 2], cls=["a", 1]), "sep[0] is 'b'"),
]


@pytest.mark.parametrize(("_", "own", "change", "words"), KINDS, ids=[kind[0] for kind in KINDS])
def test_other_kinds_of_tokenizers(_, own, change, words, tmp_path, monkeypatch):
    ask_here(monkeypatch, tmp_path)
    for name in ("source", "copy"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "tokenizer.json", {"version": "1.0", **own})
    changed("tokenizer.json", change)(tmp_path / "copy")
    found = list(side_differences(SideFiles(tmp_path / "copy"), SideFiles(tmp_path / "source"), "in the source"))
    assert [one.severity for one in found] == (["error"] if words else []), found
    assert not words or words in found[0].words


@pytest.mark.parametrize(
    ("mine", "its", "severities"),
    by_day(
        [
            ({"tokenizer.model": "a"}, {"tokenizer.model": "b"}, ["error"]),
            ({"tokenizer.model": "a"}, {"tokenizer.model": "a"}, []),
            ({"vocab.txt": "a\nb\n"}, {"vocab.txt": "b\na\n"}, ["error"]),
            ({"vocab.txt": "a\r\nb\r\n"}, {"vocab.txt": "a\nb\n"}, []),
            ({"tekken.json": '{"a": 1}'}, {"tekken.json": '{"a": 2}'}, ["error"]),
            ({"tekken.json": '{ "a": 1}'}, {"tekken.json": '{"a":1}'}, []),
            ({"qwen.tiktoken": "YQ== 0"}, {"qwen.tiktoken": "YQ== 1"}, ["error"]),
            ({}, {"tokenizer.model": "a"}, ["error"]),
            ({"tokenizer.model": "a"}, {}, ["warning"]),
        ]
    ),
)
def test_tokenizers_without_tokenizer_json(mine, its, severities, tmp_path):
    for name, files in (("source", its), ("copy", mine)):
        (tmp_path / name).mkdir()
        for file, text in files.items():
            write(tmp_path / name, file, text)
    found = list(side_differences(SideFiles(tmp_path / "copy"), SideFiles(tmp_path / "source"), "in the source"))
    assert [one.severity for one in found] == severities
