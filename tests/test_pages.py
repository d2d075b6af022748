"""The documentation: the site builds strictly, commands of the first pages run, all others have options that exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import models
import pytest

from ckptkit.app.cli import _MODULES, cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/cards").glob("*.md")])
# Their shell blocks run here, or say why they do not.
FIRST = ("docs/index.md", "docs/jobs.md", "docs/cards/index.md")
_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>(?:not )?run)(?:: (?P<reason>.+?))? -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
_COMMAND = re.compile(r"^(?:\$ )?(ckptkit \w+ .*|ckptkit \w+)$", re.M)
_LAUNCH = (
    'python3 train.py "${MODEL_ARGS[@]}" --hf-checkpoint Qwen3-30B-A3B --load qwen3-megatron --ref-load qwen3-megatron'
)
SCRIPTS = {
    "run-slime.sh": f"source model-args.sh\n{_LAUNCH} --tensor-model-parallel-size 2 --expert-model-parallel-size 2\n",
    "run-miles.sh": f"source model-args.sh\n{_LAUNCH} --megatron-to-hf-mode raw --tensor-model-parallel-size 2\n",
    "run-verl.sh": "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer"
    " actor_rollout_ref.model.path=Qwen3-30B-A3B actor_rollout_ref.rollout.name=sglang"
    " actor_rollout_ref.actor.megatron.use_dist_checkpointing=True"
    " actor_rollout_ref.actor.megatron.dist_checkpointing_path=qwen3-megatron/release"
    " actor_rollout_ref.ref.megatron.use_dist_checkpointing=True"
    " actor_rollout_ref.ref.megatron.dist_checkpointing_path=qwen3-megatron/release\n",
}


@dataclass(frozen=True)
class Block:
    page: str
    mark: str | None
    reason: str | None
    kind: str
    text: str

    @property
    def commands(self) -> Iterator[str]:
        """Its lines, continued ones as one."""
        return (line for line in self.text.replace("\\\n", " ").splitlines() if line.strip())


BLOCKS = [
    Block(str(page.relative_to(ROOT)), *found.group("mark", "reason", "kind", "text"))
    for page in PAGES
    for found in _BLOCK.finditer(page.read_text())
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model under the name that the pages use, in three shards, with a tokenizer."""
    path = tmp_path_factory.mktemp("pages") / "Qwen3-30B-A3B"
    models.save("qwen3_moe", path, shard_size="4900KB")
    return path


def test_site_builds_with_every_link_and_anchor_right(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    checks = (tmp_path / "checks.html").read_text()
    assert re.search(r'<h2 id="ck505">.*every router is alive in SGLang', checks)
    line = (tmp_path / "reference-cli.html").read_text()
    assert "--against-megatron" in line
    assert "Sentinel" not in line
    assert 'id="ckptkit.app.api.convert"' in (tmp_path / "reference-python.html").read_text()
    assert not re.search(r"<(?:script|link)[^>]+(?:src|href)=.https?:", checks), "nothing is fetched from elsewhere"
    assert 'id="s17"' in (tmp_path / "symptoms.html").read_text()


@pytest.mark.parametrize(
    "words",
    [
        "Garbled output at step 1",
        "Router is zero",
        "KL is not 0 at step 1",
        "Second step garbled",
        "Out of memory while converting",
        "Names do not match",
    ],
)
def test_symptom_is_a_heading_in_the_words_of_who_has_it(words: str) -> None:
    assert f". {words}" in (ROOT / "docs/symptoms.md").read_text()
    assert words.lower() in " ".join((ROOT / "docs/index.md").read_text().split()).lower()


@pytest.mark.parametrize("page", FIRST)
def test_shell_blocks_of_first_pages_run_or_say_why_not(page: str) -> None:
    shell = [block for block in BLOCKS if block.page == page and block.kind == "bash"]
    assert shell
    assert [
        block.text for block in shell if block.mark is None or (block.mark == "not run") != bool(block.reason)
    ] == []
    for block in shell:
        if block.mark == "not run":
            print(f"{page}: not run, {block.reason}: {block.text.splitlines()[0]}")


@pytest.mark.parametrize("page", [page for page in FIRST if page != "docs/cards/index.md"])
def test_commands_of_page_run_as_it_says(
    page: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny, tmp_path / tiny.name)
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in BLOCKS if block.page == page and block.mark == "run"]
    assert len(blocks) >= 4
    for block in blocks:
        for line in block.commands:
            command, _, remark = line.partition("  # exits ")
            assert run(command) == int(remark or 0), command
        if page == "docs/jobs.md":  # every section begins anew
            for made in ("qwen3-int4", "qwen3-trained"):
                shutil.rmtree(tmp_path / made, ignore_errors=True)


def run(line: str) -> int:
    """Runs a line as a shell would, `ckptkit` in this process. Returns its exit code."""
    words = shlex.split(line)
    if words[0] != "ckptkit":
        return subprocess.run(words, check=False).returncode
    if words[1] == "convert" and Path(words[3]).exists():
        return 0  # an earlier section of the page has made it
    output = Path(words.pop(words.index(">") + 1)) if ">" in words else None
    arguments = [word for word in words[1:] if word != ">"]
    said = StringIO()
    with redirect_stdout(said):
        try:
            code = cli.main(arguments, standalone_mode=False)
        except SystemExit as end:
            code = end.code
    print(f"$ {line}", said.getvalue(), sep="\n")
    if output:
        output.write_text(said.getvalue())
    return code if isinstance(code, int) else 0


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
