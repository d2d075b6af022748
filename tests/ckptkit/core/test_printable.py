"""Whatever the names in a checkpoint are, what is printed moves no cursor, turns no text round and forges no line."""

import ast
import json
import re
import shutil
import unicodedata
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.nightly import daily

from ckptkit.app.api import quantize
from ckptkit.app.run_options import RunOptions
from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import json_text, printable
from ckptkit.quant.schemes.w4a16 import int4_scheme

# Escape codes, carriage return, three line breaks, C1, marks that reverse text, DEL: and the verdict they would forge.
EVIL = "a\x1b[2J\x1b[1;1H\rb\nPASSED  forged\x85PASSED\x9b31m\u202ec\u2028PASSED\u2029\x7f\u200f\ufeff\u2066"
SCOPE = r"(:? [\w ,]+(; [\w ,:-]+)*)?"
VERDICT = re.compile(rf"PASSED( with \d+ warnings?)?{SCOPE}  /\S+/(model|qwen2-tied)((, | against )/\S+)*")
HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
REPORTS = (".json", ".md", ".xml", ".sarif", ".html")


CREDENTIALS = {
    "s3://KEY:T/O+P@bucket/x": "s3://***@bucket/x",  # keys of AWS have slashes
    "s3://KEY:T?O#P@bucket/x": "s3://***@bucket/x",
    "s3://KEY:T@O@P@bucket/x": "s3://***@bucket/x",
    "HTTPS://U:TOP@h": "HTTPS://***@h",
    "https://TOP@github.com/a.git": "https://***@github.com/a.git",
    "see s3://K:TOP@b, and 'http://u:TOP@h'.": "see s3://***@b, and 'http://***@h'.",
    "--load=az://u:TOP@h/c --x": "--load=az://***@h/c --x",
    "http://h/x?X-Amz-Credential=TOP&X-Amz-Signature=TOP": "http://h/x?***",
    "http://u:TOP@h/x?a=1&access_token=TOP": "http://***@h/x?***",
    "http://h/#id_token=TOP": "http://h/#***",
    "s3:/KEY:TOP@bucket/x": "s3:/***@bucket/x",  # as a path leaves it
    "/home/me/hf:/u:TOP@org/x": "/home/me/hf:/***@org/x",
    "filecache::s3:/K:TOP@b": "filecache::s3:/***@b",
    "s3://K:T'O\"P@b/x": "s3://***@b/x",
    "hf://u%3aTOP@org/x": "hf://***@org/x",
    "http://h/x?pwd=TOP": "http://h/x?***",
}
WITHOUT = [
    "hf://gpt2@main",
    "abfs://container@account.dfs.core.windows.net/x",
    "s3://bucket/a@b",
    "http://127.0.0.1:30000/server_info: timed out",
    "http://[::1]:80/x",
    "http://h/x?page=1#top",
    "user@host:/path and a:b@c",
    "hf://hf_team@main/x",
    "C:/a:b@c and so:/a:b@c",
]


def test_urls_are_shown_without_credentials():
    shown = CREDENTIALS | {text: text for text in WITHOUT}
    assert {text: printable(text) for text in shown} == shown
    assert json.loads(json_text({"a": [*shown]})) == {"a": [*shown.values()]}


def test_the_command_that_a_manifest_keeps_has_no_credentials():
    options = RunOptions("convert", "s3://KEY:TOP@bucket/x", "az://u:TOP@h/made", hf="http://h/x?sig=TOP")
    assert options.command() == ["ckptkit", "convert", "s3://***@bucket/x", "--hf", "http://h/x?***"]


def assert_harmless(text):
    found = sorted({f"{ord(char):#x}" for char in text if char != "\n" and unicodedata.category(char) in HIDDEN})
    assert found == [], text
    # The verdict, which is the last line.
    lines = text.rstrip("\n").split("\n")
    rest = lines[:-1] if VERDICT.fullmatch(lines[-1]) else lines
    assert [line for line in rest if line.startswith("PASSED")] == []


def change(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weight_map(model):
    return dict(json.loads((model / "model.safetensors.index.json").read_text())["weight_map"])


CONFIGS = {
    "type": {"model_type": EVIL},
    "values": {
        **dict.fromkeys((EVIL, "dtype", "torch_dtype", "hidden_act"), EVIL),
        "architectures": [EVIL],
        "rope_scaling": {"rope_type": EVIL, EVIL: 1},
    },
    "quantizer": {
        "quantization_config": {
            "quant_method": EVIL,
            "format": EVIL,
            "ignore": [EVIL],
            "config_groups": {EVIL: {"targets": [EVIL]}},
        }
    },
    "a_path": {"num_hidden_layers": 99},
}


def with_tensor(model):
    names = weight_map(model)
    file = next(iter(names.values()))
    save_file(load_file(model / file) | {EVIL: torch.ones(2)}, model / file, {"format": "pt"})
    names |= {EVIL: file, f"model.layers.0.{EVIL}": file}
    change(model / "model.safetensors.index.json", weight_map=names)


def with_files(model):
    (model / f"{EVIL}.safetensors").write_bytes(b"x")
    (model / f"{EVIL}.json").write_text("{")
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": EVIL, "tokenizer_class": EVIL}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": EVIL}))
    names = weight_map(model) | {"model.norm.weight": f"{EVIL}.safetensors"}
    change(model / "model.safetensors.index.json", weight_map=names)


def with_entries(model):
    quantize(model, model.with_name("int4"), int4_scheme(group_size=32))
    shutil.rmtree(model)
    model.with_name("int4").rename(model)
    scheme = json.loads((model / "config.json").read_text())["quantization_config"]
    entries = [*scheme["ignore"], EVIL, f"re:{EVIL}", f"re:.*q_proj.*|{EVIL}"]
    change(model / "config.json", quantization_config=scheme | {"ignore": entries})


def with_config(kind, model):
    change(model / "config.json", **CONFIGS[kind])


HOSTILE = {
    **{kind: partial(with_config, kind) for kind in CONFIGS},
    "tensor": with_tensor,
    "files": with_files,
    "entries": with_entries,
}
VERBS = (
    *("inspect M", "inspect M --json", "inspect M --megatron-args", "convert M OUT", "convert M OUT --dry-run"),
    *("--debug convert M OUT", "quantize M OUT --group-size 32 --dry-run", "lint M", "lint M --json"),
    *("quantize CLEAN OUT --group-size 32 --ignore EVIL", "manifest M --output OUT", "verify CLEAN --source M --json"),
    *("verify M --source CLEAN REPORTS", "preflight --hf-checkpoint M --load CLEAN REPORTS"),
)


def words_of(verb, model, clean, out):
    """The words of a verb that is given a hostile model, a clean one, and a place to write."""
    known = {"M": str(model), "CLEAN": str(clean), "OUT": str(out), "EVIL": EVIL}
    for word in verb.split(" "):
        yield from (f"--report={out}{ending}" for ending in REPORTS) if word == "REPORTS" else [known.get(word, word)]


# Every verb with every kind at night; daily each of both.
CELLS = [(hostile, verb) for hostile in HOSTILE for verb in VERBS]
DAILY = [cell for cell in CELLS if cell[0] == "values" or cell[1] == VERBS[-2]]


@pytest.mark.parametrize("cell", daily(CELLS, DAILY), ids=" ".join)
def test_names_of_a_checkpoint_are_printed_escaped(cell, ckptkit, releases, tmp_path):
    hostile, verb = cell
    clean = releases("qwen2-tied")
    model = tmp_path / (EVIL if hostile == "a_path" else "model")
    shutil.copytree(clean, model)
    HOSTILE[hostile](model)
    done = ckptkit(*words_of(verb, model, clean, tmp_path / "out"))
    assert done.stdout or done.stderr
    assert_harmless(done.stdout)
    assert_harmless(done.stderr)
    for ending in REPORTS:
        if (written := Path(f"{tmp_path / 'out'}{ending}")).exists():
            assert_harmless(written.read_text(encoding="utf-8").replace("\t", " "))


@pytest.mark.parametrize("verb", ["inspect M", *VERBS[-2:], "convert M OUT", "manifest M --output OUT"])
def test_names_of_a_megatron_checkpoint_are_printed_escaped(verb, ckptkit, releases, converted, copy_of, tmp_path):
    model = copy_of(converted("qwen2-tied"))
    with_config("type", model / "hf")
    for _ in ("its type", "its iteration"):
        done = ckptkit(*words_of(verb, model, releases("qwen2-tied"), tmp_path / "out"))
        assert_harmless(done.stdout)
        assert_harmless(done.stderr)
        (model / "latest_checkpointed_iteration.txt").write_text(EVIL)


def test_words_of_the_command_line_are_printed_escaped(ckptkit):
    for words in (
        *([EVIL], ["inspect", EVIL, EVIL], ["inspect", f"--{EVIL}"], ["explain", "zebra\x1b[2J\u202e\x9b"]),
        *(["verify", ".", "--report", EVIL], ["convert", EVIL, EVIL]),
    ):
        done = ckptkit(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert_harmless(done.stderr)


def test_destination_is_printed_escaped(ckptkit, releases, tmp_path):
    for options in (["--dry-run"], [], ["--json", "--overwrite"]):
        done = ckptkit("convert", releases("qwen2-tied"), tmp_path / EVIL, *options)
        assert done.returncode == 0, done.stderr
        assert_harmless(done.stdout)
        assert_harmless(done.stderr)


def test_error_is_escaped_also_where_python_prints_it():
    assert str(CkptkitError("a\nb\x1b", "c\rd")) == "a\\x0ab\\x1b\n  next: c\\x0dd"
    assert CkptkitError("a\nb").message == "a\nb"
    several = CkptkitError("two are wrong", "look", ["a\nb", "c"])
    assert (several.message, str(several)) == ("two are wrong: a\nb; c", "two are wrong:\n  a\\x0ab\n  c\n  next: look")


def test_printable_leaves_what_can_be_seen():
    for text in ("model.layers.{0..11}.mlp", "größe 中文 é ✗ … café", "a\\x1b"):
        assert printable(text) == text
    assert printable("\t\x00\u00ad\u061c\ud800\U000e0001") == "\\x09\\x00\\xad\\u061c\\ud800\\U000e0001"
    assert json.loads(json_text({EVIL: EVIL})) == {EVIL: EVIL}


def test_nothing_is_printed_but_through_the_functions_that_escape():
    root = Path(__file__).resolve().parents[3]
    prints = {"print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write"}
    found = [
        f"{file.relative_to(root)}: {ast.unparse(node)}"
        for package in ("ckptkit", "converters", "quant", "verify")
        for file in sorted((root / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in prints
    ]
    assert found == [
        "ckptkit/app/cli/__init__.py: click.secho('error: ', fg='red', bold=True, nl=False, err=True)",
        "ckptkit/app/cli/output.py: click.echo(text, err=True)",
        "ckptkit/app/cli/output.py: click.echo(json_text(content))",
        "ckptkit/app/cli/output.py: click.echo(text)",
        # The name of a stand-in, one of four words.
        "ckptkit/app/stand_in.py: print(f'{name}: command not found', file=sys.stderr)",
        "ckptkit/app/stand_in.py: print(f'ckptkit gate: {name} is not started, because the launch was stopped', "
        "file=sys.stderr)",
        "verify/weight_sync/messages.py: print(printable(f'ckptkit: {text}'), file=sys.stderr, flush=True)",
    ]
