"""Each kind of error has a code that a program can branch on; what other libraries raise becomes one readable line."""

import ast
import json
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
from support.messages import refusal

from ckptkit.app.run_options import parse_size
from ckptkit.core.errors import (
    CkptkitError,
    DamagedError,
    FinalError,
    MissingDependencyError,
    MissingError,
    UnknownModelError,
    UnsupportedError,
    UsageError,
    words_of,
)
from ckptkit.core.printable import one_line, printable
from ckptkit.core.specs import fold, summarize
from ckptkit.formats.detect import TRACKER, locate, refuse_hf, tracked_iteration
from ckptkit.formats.hf.reader import read_json
from ckptkit.formats.hf.shard import read_shard
from ckptkit.formats.torch_dist.reader import read_metadata
from ckptkit.storage.fingerprint import ChangedError
from ckptkit.storage.url import Store, StoreError
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.weight_sync.loaded import DiffersError


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (CkptkitError, "other"),
        (UsageError, "usage"),
        (UnsupportedError, "unsupported"),
        (UnknownModelError, "unsupported"),
        (MissingDependencyError, "missing-dependency"),
        (MissingError, "missing"),
        (DamagedError, "damaged"),
        (StoreError, "storage"),
        (ChangedError, "changed"),
        (DiffersError, "mismatch"),
        (FinalError, "other"),
    ],
)
def test_error_kind_has_its_code_also_when_pickled(kind, code):
    assert pickle.loads(pickle.dumps(kind("what", "next"))).code == code


def test_given_code_survives_pickling_and_becoming_final():
    given = CkptkitError("what", "next", ["one"], code="storage")
    final = FinalError.of(pickle.loads(pickle.dumps(given)))
    assert (final.code, final.hint, final.details, final.resumable) == ("storage", "next", ("one",), False)


def test_missing_library_of_a_store_is_a_missing_dependency(monkeypatch):
    monkeypatch.setitem(sys.modules, "adlfs", None)  # no other test loads it
    assert code_when(Store("az://container/folder").top) == "missing-dependency"


def code_when(action, *arguments):
    return refusal("", action, *arguments).code


def test_each_fault_of_a_file_or_an_option_has_its_code(tmp_path):
    assert code_when(locate, tmp_path / "nowhere") == code_when(locate, tmp_path) == "missing"
    readers = {
        "config.json": lambda: read_json(tmp_path / "config.json"),
        "model.safetensors": lambda: read_shard(tmp_path / "model.safetensors"),
        ".metadata": lambda: read_metadata(tmp_path),
        TRACKER: lambda: tracked_iteration(tmp_path),
    }
    (tmp_path / TRACKER).write_text("7")
    assert {code_when(read) for read in readers.values()} == {"missing"}
    for name, content in zip(readers, (b'{"model_type": ', b"\x40", b"\x80\x04", b"seven"), strict=True):
        (tmp_path / name).write_bytes(content)
        assert code_when(readers[name]) == "damaged"
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    assert code_when(readers["config.json"]) == "other"  # neither missing nor damaged
    assert code_when(parse_size, "much") == code_when(refuse_hf, tmp_path, tmp_path) == "usage"
    assert code_when(lambda: VerifyOptions(cp=2)) == "usage"


def error_of(call):
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        call()
    return caught.value


def test_refusal_of_pydantic_names_every_field_and_its_value():
    from compressed_tensors.quantization import QuantizationConfig

    weights = {"num_bits": "x", "type": "int", "strategy": "group", "group_size": 32, "actorder": "sideways", "foo": 3}
    content = {"format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    error = error_of(lambda: QuantizationConfig.model_validate(content))
    assert "function-after" in str(error)
    words = words_of(error)
    assert re.match(r"\d+ validation errors for QuantizationConfig: config_groups\.group_0\.weights\.", words)
    assert "config_groups.group_0.weights.num_bits: Input should be a valid integer" in words
    assert "; config_groups.group_0.weights.foo: Extra inputs are not permitted (it is 3)" in words
    assert "(it is 'sideways')" in words
    assert printable(words) == words
    assert not any(part in words for part in ("errors.pydantic.dev", "function-after", "[type="))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stack_inside_a_message_is_left_out(tmp_path):
    import torch.distributed.checkpoint as dcp

    error = error_of(lambda: dcp.load({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True))
    assert "site-packages" in str(error)
    assert words_of(error) == "CheckpointException ranks:dict_keys([0]); AssertionError: metadata is None"


def test_config_that_transformers_refuses(tmp_path):
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": "many"}))
    assert words_of(error_of(lambda: AutoConfig.from_pretrained(tmp_path))) == (
        "Validation error for field 'hidden_size': TypeError: Field 'hidden_size' expected int, got str (value: 'many')"
    )


def test_class_stands_before_a_key_and_instead_of_nothing():
    assert words_of(error_of(lambda: {}["layers.0"])) == "KeyError: 'layers.0'"
    assert words_of(AssertionError()) == "AssertionError"
    assert words_of(ValueError("no")) == "no"


LINES = {
    'File "/opt/x/lib/python3.11/site-packages/sglang/srt/a.py", line 3': 'File "sglang/srt/a.py", line 3',
    "(from /usr/lib/python3/dist-packages/numpy/b.so)": "(from numpy/b.so)",
    "at /usr/lib/python3.12/json/decoder.py:4": "at json/decoder.py:4",
    "/data/models/qwen/config.json is not there": "/data/models/qwen/config.json is not there",
    "first\nsecond": "first; second",
    "first:\n\tsecond\n\tthird": "first: second; third",
    "one \nsentence.\n\nAnother": "one sentence. Another",
    "\x1b[31mred\x1b[0m\nblack": "red; black",
    "": "",
    "\n \n": "",
}


def test_text_on_one_line():
    assert {text: one_line(text) for text in LINES} == LINES


def test_long_text_is_read_in_one_pass():
    """In two loops it would take hours, longer than a test may."""
    for part in ("a", "/", "a/", "function-a[", "[", " [type=a, input_value=", "\n", ":\n "):
        assert one_line(part * 1_000_000).count("\n") == 0, part


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["lm_head.weight"], ["lm_head.weight"]),
        ([f"model.layers.{i}.mlp.gate.weight" for i in range(48)], ["model.layers.{0..47}.mlp.gate.weight"]),
        (["a.1.w", "a.3.w", "a.4.w"], ["a.{1,3..4}.w"]),
        ([f"l.{i}.e.{e}.w" for i in range(3) for e in range(12)], ["l.{0..2}.e.{0..11}.w"]),
        # layer 2 lacks expert 1: folding must not claim it
        (["l.1.e.0.w", "l.1.e.1.w", "l.2.e.0.w"], ["l.1.e.{0..1}.w", "l.2.e.0.w"]),
        ([], []),
    ],
)
def test_fold_joins_names_that_differ_in_numbers(names, folded):
    assert sorted(fold(names)) == sorted(folded)


def test_summarize_counts_what_it_leaves_out():
    assert summarize(["a", "b", "c"], limit=2) == "a, b and 1 more"


# Where an exception's own text is shown all the same: what raises there is ckptkit's own, or says one line of its own.
ONE_LINE = {
    "ckptkit/formats/hf/reader.py": "json",
    "ckptkit/formats/hf/shard.py": "json",
    "ckptkit/formats/torch_dist/reader.py": "the restricted unpickler",
    "ckptkit/formats/torch_save/blob.py": "the restricted unpickler",
    "ckptkit/formats/yaml_text.py": "PyYAML, whose lines are joined",
    "converters/megatron/run_config.py": "`formats/yaml_text.py`",
    "quant/patterns.py": "re",
    "verify/evidence/expected.py": "int and float",
    "verify/launch/python/expressions.py": "Python's operators",
    "verify/launch/settings/config.py": "arithmetic",
    "verify/launch/settings/tree.py": "`formats/yaml_text.py`",
}
OF_THE_SYSTEM = ("OSError", "BaseException")  # one line each


def test_every_text_of_another_library_goes_through_words_of():
    root = Path(__file__).resolve().parents[3]
    files = [
        file for one in ("ckptkit", "converters", "quant", "verify") for file in sorted((root / one).rglob("*.py"))
    ]
    trees = {file.relative_to(root).as_posix(): ast.parse(file.read_text()) for file in files}
    own = {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found = {
        file
        for file, tree in trees.items()
        for handler in ast.walk(tree)
        if isinstance(handler, ast.ExceptHandler) and handler.name and not _caught(handler) <= {*own, *OF_THE_SYSTEM}
        if any(_shows(node, handler.name) for node in ast.walk(handler))
    }
    assert found == set(ONE_LINE)


def _caught(handler):
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(kind).rpartition(".")[2] for kind in kinds if kind is not None}


def _shows(node, name):
    """Whether this puts the exception's text into a string."""
    match node:
        case ast.FormattedValue(value=ast.Name(id=shown)):
            return shown == name
        case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id=shown)]):
            return shown == name
    return False
