"""Writes the JSON reports of every test checkpoint and every mutation to a folder, or compares two such folders.

    python lab/report_matrix.py write FOLDER
    python lab/report_matrix.py compare BEFORE AFTER

`write` runs `verify`, `lint`, `inspect` and `preflight` through the command line of the tree that it lies in, so the
folders of two commits can be compared. Codes, statuses, severities, counts, tensors and files must be equal. Words may
differ, and are listed.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import click

TREE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TREE), str(TREE / "tests")]

import torch  # noqa: E402 - the tree of this script comes first on the path
from families import CASES, case  # noqa: E402
from mutations import MUTATIONS  # noqa: E402
from mutations.starts import Starts  # noqa: E402
from support import quantized  # noqa: E402

from ckptkit.app.cli import cli  # noqa: E402
from ckptkit.quant.ignore import tiles  # noqa: E402

# Times, places and what differs from run to run.
DROPPED = {"seconds", "date", "version", "command", "elapsed"}
# Keys whose text is for people, at any depth below them.
WORDS = {
    "title",
    "expected",
    "actual",
    "hint",
    "reason",
    "reasons",
    "facts",
    "notes",
    "message",
    "quantization",
    "severities",
}
TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INT4 = quantized.compressed_config("pack-quantized", strategy="group", group_size=32, symmetric=False)
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
# Quantized releases by name: the test model, the ending of what is quantized, how, and the quantization_config.
QUANTIZED = {
    "fp8-dense": ("qwen2-untied", "_proj.weight", quantized.fp8_blocks(128, 128), FP8),
    "fp8-experts": ("qwen3_moe", "_proj.weight", quantized.fp8_blocks(128, 128), FP8),
    "int4-asymmetric": (
        "qwen2-tied",
        "_proj.weight",
        quantized.int4(symmetric=False, strategy="group", group_size=32),
        INT4,
    ),
    "mxfp4": ("gpt_oss-v4", "_proj", quantized.mxfp4, MXFP4),
}


def invoke(*arguments: str | Path) -> dict[str, Any]:
    """What a verb prints with --json, and its exit code; its message where it refuses."""
    out = io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(io.StringIO()):
            code = cli.main([*map(str, arguments), "--json"], standalone_mode=False)
    except SystemExit as ended:  # how a verb with findings ends
        code = ended.code
    except (click.ClickException, Exception) as error:  # noqa: BLE001 - a crash is an outcome to compare too
        return {"refused": type(error).__name__, "message": str(error)}
    text = out.getvalue()
    return {"code": code, "report": json.loads(text) if text else None}


def normalized(value: Any, root: Path) -> Any:
    """The same JSON without times, and with `<root>` for the temporary folder."""
    if isinstance(value, dict):
        return {
            key.replace(str(root), "<root>"): normalized(one, root) for key, one in value.items() if key not in DROPPED
        }
    if isinstance(value, list):
        return [normalized(one, root) for one in value]
    return TIME.sub("<time>", value.replace(str(root), "<root>")) if isinstance(value, str) else value


def reports(path: Path, source: Path | None, verify: Sequence[str | Path]) -> dict[str, Any]:
    """What the four verbs say of one checkpoint. `source`: the HF release it comes from; `verify`: further options."""
    megatron = (path / "release").is_dir() or (path / "latest_checkpointed_iteration.txt").exists()
    found = {"verify": invoke("verify", path, *verify), "inspect": invoke("inspect", path)}
    if megatron:
        found["preflight"] = invoke("preflight", "--hf-checkpoint", source or path / "hf", "--ref-load", path)
    else:
        found |= {"lint": invoke("lint", path), "preflight": invoke("preflight", "--hf-checkpoint", path)}
    return found


def releases(root: Path) -> Iterator[tuple[str, Path, Path | None]]:
    """Label, path and source of every sound checkpoint: each test model in HF, Megatron and INT4; quantized ones."""
    for name, model in CASES.items():
        plain = root / name / "hf"
        case.save(name, model, plain, torch.bfloat16)
        yield f"{name}/hf", plain, None
        if model.fused:
            case.save(name, model, root / name / "fused", torch.bfloat16, fused=True)
            yield f"{name}/fused", root / name / "fused", plain
        invoke("convert", plain, root / name / "megatron")
        packing = ("quantize", plain, root / name / "int4", "--group-size", "32")
        if "refused" in invoke(*packing):
            invoke(*packing, "--ignore", r"re:.*\.self_attn\..*")  # heads that groups of 32 do not divide
        for kind in ("megatron", "int4"):
            if (root / name / kind).exists():
                yield f"{name}/{kind}", root / name / kind, plain
        shutil.rmtree(root / name)
    for label, (name, ending, quantizer, config) in QUANTIZED.items():
        plain, release = root / label / "hf", root / label / "release"
        case.save(name, CASES[name], plain, torch.bfloat16)
        quantized.write(
            plain,
            release,
            partial(_ends, ending),
            quantizer,
            lambda said, own=config: said | {"quantization_config": own},
        )
        yield f"{label}/release", release, plain
        invoke("convert", release, root / label / "megatron")
        yield f"{label}/megatron", root / label / "megatron", release
        shutil.rmtree(root / label)


def _ends(ending: str, name: str) -> bool:
    return name.endswith(ending)


def matrix(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Label and reports of every sound checkpoint, alone and against its source, and of every mutation."""
    for label, path, source in releases(root / "releases"):
        yield label, reports(path, source, [])
        if source is not None:
            yield f"{label}/source", {"verify": invoke("verify", path, "--source", source)}
    (root / "starts").mkdir()
    starts = Starts(root / "starts")
    for mutation in MUTATIONS:
        for label in mutation.on:
            path = Path(shutil.copytree(starts.path(label), root / "mutated"))
            mutation.damage(path, mutation.on[label])
            options: list[str | Path] = ["--source", starts.source(label)] if mutation.source else []
            options += ["--manifest", starts.manifest(label)] if mutation.with_manifest else []
            options += [word for key, value in mutation.arguments.items() for word in (f"--{key}", str(value))]
            yield f"mutations/{mutation.name}/{label}", reports(path, starts.source(label), options)
            shutil.rmtree(path)


def write(folder: Path) -> None:
    """Writes one file a checkpoint."""
    folder.mkdir(parents=True)
    tiles.unrunnable = lambda *_: None  # test models are smaller than the tiles of SGLang's kernels
    with tempfile.TemporaryDirectory() as work:
        for label, found in matrix(Path(work)):
            file = folder / f"{label.replace('/', '__')}.json"
            file.write_text(json.dumps(normalized(found, Path(work)), indent=1, sort_keys=True) + "\n")
            print(label, file=sys.stderr)


def differences(before: Any, after: Any, place: str = "", words: bool = False) -> Iterator[tuple[bool, str, Any, Any]]:
    """Each place where two reports differ: whether it is one of words alone, the place, and both values."""
    if isinstance(before, dict) and isinstance(after, dict) and (before.keys() == after.keys() or not words):
        for key in sorted(before.keys() | after.keys()):
            yield from differences(before.get(key), after.get(key), f"{place}.{key}", words or key in WORDS)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{place}[{index}]", words)
    elif before != after:
        yield words and type(before) is type(after), place, before, after


def compare(before: Path, after: Path) -> int:
    """Prints what differs, each change of words once; returns 1 where anything but words does."""
    files = sorted({file.name for folder in (before, after) for file in folder.glob("*.json")})
    wrong, changed = 0, Counter[tuple[str, str]]()
    for name in files:
        sides = [
            json.loads((folder / name).read_text()) if (folder / name).exists() else None for folder in (before, after)
        ]
        for only_words, place, one, other in differences(*sides):
            if only_words:
                changed[str(one), str(other)] += 1
            else:
                wrong += 1
                print(f"DIFFERENT {name}{place}: {str(one)[:300]!r} -> {str(other)[:300]!r}")
    for (one, other), count in sorted(changed.items()):
        print(f"words ({count}):\n  - {one}\n  + {other}")
    print(f"{len(files)} reports, {wrong} differences, {len(changed)} changes of words")
    return int(wrong > 0 or not files)


def main() -> int:
    """The command line of this script."""
    if sys.argv[1:2] == ["write"] and len(sys.argv) == 3:
        write(Path(sys.argv[2]))
        return 0
    if sys.argv[1:2] == ["compare"] and len(sys.argv) == 4:
        return compare(Path(sys.argv[2]), Path(sys.argv[3]))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
