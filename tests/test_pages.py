"""The documentation: the site builds strictly, symptoms are headings, commands have verbs and options that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from support.page_blocks import BLOCKS, ROOT

from ckptkit.app.cli import _MODULES, cli
from verify.check import all_checks

_COMMAND = re.compile(r"^(?:\$ )?(ckptkit \w+ .*|ckptkit \w+)$", re.M)


def test_site_builds_with_every_link_and_anchor_right(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    checks = (tmp_path / "checks.html").read_text()
    assert re.search(r'<a href="checks/CK505.html">CK505</a> every router is alive in SGLang', checks)
    assert re.search(r"<h1 .*CK505: every router is alive in SGLang", (tmp_path / "checks/CK505.html").read_text())
    assert {page.stem for page in (tmp_path / "checks").glob("*.html")} == {check.code for check in all_checks()}
    line = (tmp_path / "reference-cli.html").read_text()
    assert "--against-megatron" in line
    assert "Sentinel" not in line
    assert 'id="ckptkit.app.api.convert"' in (tmp_path / "reference-python.html").read_text()
    assert not re.search(r"<(?:script|link)[^>]+(?:src|href)=.https?:", checks), "nothing is fetched from elsewhere"
    assert 'id="s17"' in (tmp_path / "symptoms.html").read_text()


def test_commands_of_all_pages_have_verbs_and_options_that_exist() -> None:
    wrong, count = [], 0
    for block in BLOCKS:
        for line in _COMMAND.findall(block.text.replace("\\\n", " ")):
            words = shlex.split(line, comments=True)
            verb, rest = words[1], words[2 : words.index("--") if "--" in words else None]
            count += 1
            found = cli.get_command(cli.make_context("ckptkit", ["--help"], resilient_parsing=True), verb)
            known = {name for option in found.params for name in option.opts} if found else set()
            given = {word.strip(",;").partition("=")[0] for word in rest if word.startswith("--")}
            if verb not in _MODULES or not given <= known:
                wrong.append(f"{block.page}: {line}")
    assert wrong == []
    assert count > 40
