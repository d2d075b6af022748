"""No two files import each other; `make lint` holds the layers (import-linter, pyproject.toml)."""

import ast
import graphlib
import re
from collections import defaultdict
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ckptkit", "converters", "quant", "verify")


def test_no_two_files_import_each_other():
    graph = grimp.build_graph("ckptkit", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 300
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules


def test_packages_are_imported_by_one_name_alone():
    """From the top of the repository `import verify` would find the folder, and load every module a second time."""
    bare = re.compile(r"^\s*(?:from|import) (?:converters|quant|verify)\b", re.MULTILINE)
    assert bare.search("    from verify.run import verify")
    assert not bare.search("from ckptkit.verify.run import verify")
    folders = (*PACKAGES, "tests", "docs", "lab", "benchmarks")
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    assert [str(file.relative_to(ROOT)) for file in files if bare.search(file.read_text())] == []


def test_kinds_of_checkpoints_are_declared_in_one_place():
    compares = re.compile(r"""Literal\[["']hf["'], ["']megatron["']""")
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    assert [str(file.relative_to(ROOT)) for file in files if compares.search(file.read_text())] == [
        "ckptkit/formats/detect.py"
    ]


# What starts programs, and who may call it: `nvidia-smi`, forks of a witness, the command that `gate` is given and what
# that starts (its own Python by -I), and the one way to start Python.
STARTS = re.compile(
    r"subprocess\.(?:Popen|run|call|check_call|check_output|getoutput|getstatusoutput)"
    r"|os\.(?:system|popen|exec\w+|spawn\w+|posix_spawn\w*|fork|forkpty)|pty\.(?:spawn|fork)"
    r"|(?:torch\.)?multiprocessing\.(?:get_context|Process|Pool|spawn|Manager|set_start_method)"
    r"|\w*\.?ProcessPoolExecutor|mp\.\w+|asyncio\.create_subprocess_\w+"
)
STARTERS = {
    "ckptkit.app.doctor": {"subprocess.run"},
    "ckptkit.app.gate": {"subprocess.Popen"},
    "ckptkit.app.stand_in": {"subprocess.run", "os.execv"},
    "ckptkit.core.isolation": {"subprocess.Popen"},
    "verify.witnesses.megatron.process": {"multiprocessing.get_context"},
}


def test_python_is_started_in_one_place():
    found = {}
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and STARTS.fullmatch(name := ast.unparse(node.func)):
                found.setdefault(module, set()).add(name)
            # By another name, a call would not be found.
            elif isinstance(node, ast.ImportFrom) and node.module in ("subprocess", "multiprocessing", "pty"):
                found.setdefault(module, set()).add(f"from {node.module}")
    assert found == STARTERS


# What every engine, every stack and every process of a witness offers, under one name each.
INTERFACES = {
    *("build", "emulated_device", "configure", "fill", "layout", "left_empty", "share"),
    *("start_process_groups", "run_after_loading", "serve", "version", "read", "run", "main"),
}


def test_no_public_name_in_verify_means_two_things():
    homes = defaultdict(list)
    for file in (ROOT / "verify").rglob("*.py"):
        for one in ast.parse(file.read_text()).body:
            if isinstance(one, ast.ClassDef | ast.FunctionDef) and not one.name.startswith("_"):
                homes[one.name].append(file.relative_to(ROOT))
    assert {name: files for name, files in homes.items() if len(files) > 1 and name not in INTERFACES} == {}
    assert all(len(homes[name]) > 1 for name in INTERFACES)


# Four words that messages of ours share with what is none: other programs' words, names of facts, steps and cases.
NOT_OURS = {
    *("object has no attribute", "most recent call last", "at least one of", "what would be loaded", "of q k and"),
    *("updating by tensor again", "updating by tensor over", "by tensor over poison", "q k and v", "does not load the"),
    *("updating from disk again", "updating from disk over", "from disk over poison"),
    *("the names of the", "names of the release"),
}
OF_WORDING = ("core", "reports", "triage")  # folders of tests/verify/ that test the wording itself


def fours(text):
    """All runs of four plain words of a text, outside of backticks."""
    words = [word.strip(".,;:()?!\"'") for word in re.sub(r"`[^`]*`", "`", text).split()]
    for four in zip(words, words[1:], words[2:], words[3:], strict=False):
        if all(re.fullmatch(r"[a-z]+(?:'[a-z]+)?", word) for word in four):
            yield " ".join(four)


def phrases(file):
    """Line and text of all `fours` in a file's strings. Docstrings do not count, nor do keys of dicts, subscripts,
    names of cases and reasons of skips."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    skipped = {key for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
    skipped |= {node.value for node in nodes if isinstance(node, ast.Expr)}
    skipped |= {node.slice for node in nodes if isinstance(node, ast.Subscript)}
    named = [node.value for node in nodes if isinstance(node, ast.keyword) and node.arg in ("id", "ids", "reason")]
    skipped |= {one for node in named for one in ast.walk(node)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield from ((node.lineno, four) for four in fours(node.value))


LINT = ("lint", "rules", "subject")


def test_no_test_repeats_the_wording_of_a_finding():
    """Rewording a finding changes the file of its check, and pages that are made of it.

    Of a finding a test asserts code, severity, tensors, count, file and rank, and of its texts the data: numbers,
    shapes, dtypes, names, options, versions, commands; by `in`, or by `support.messages.text_with`. Where no data tells
    two outcomes apart, one key word does. The same goes for notes, reasons and errors of verify, preflight, lint and
    diff. Tests of the wording itself are in `OF_WORDING`.
    """
    program = [*(ROOT / "verify").rglob("*.py"), *(ROOT / "quant/ignore" / f"{name}.py" for name in LINT)]
    program = [file for file in program if not {"reports", "triage"} & {*file.relative_to(ROOT).parts}]
    ours = {four for file in program for _, four in phrases(file)} - NOT_OURS
    ours |= {*fours((ROOT / "verify/core/catalogue.toml").read_text())} - NOT_OURS
    assert len(ours) > 5000
    of_wording = [ROOT / "tests/verify" / folder for folder in OF_WORDING]
    tests = [file for file in (ROOT / "tests").rglob("*.py") if not any(map(file.is_relative_to, of_wording))]
    found = [
        f"{file.relative_to(ROOT)}:{line}: {four}" for file in tests for line, four in phrases(file) if four in ours
    ]
    assert found == []
