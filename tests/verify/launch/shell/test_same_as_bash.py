"""Scripts of a file and of a grammar: our words are those that bash gives to the trainer, or not known; never others.

`CKPTKIT_CASES=10000` makes more of the grammar's, and prints how they come out.
"""

import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from support.shell_grammar import Bash, script

from ckptkit.verify.launch.shell.read import read_script

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
CASES = int(os.environ.get("CKPTKIT_CASES", "500"))
# Kind and name of a script, and its text.
SCRIPTS = {
    one.partition("\n")[0]: one.partition("\n")[2].strip("\n")
    for one in Path(__file__).with_name("scripts.txt").read_text().split("\n##### ")[1:]
}
# Model arguments in the shapes that slime's have: a loop, a sum, blanks at line ends, comments, a variant.
BASE = """COUNT="${MODEL_LAYERS:-61}"
EXPERT=1408
BOTH=$(($EXPERT * 2))

list=()
for ((n=0; n<COUNT; n++)); do
  if (( n < 3 )); then list+=(0); else list+=(1); fi
done
printf -v FREQUENCY "[%s]" "$(IFS=', '; echo "${list[*]}")"
MODEL_ARGS=(
  --spec plugin make
  --num-layers $COUNT   \n
  # experts
  --moe-layer-freq "$FREQUENCY" --moe-ffn-hidden-size ${BOTH}
  --rotary-base ${BASE:-10000}
)
"""
VARIANT = 'MODEL_LAYERS=5 BASE=5000000 source "$(dirname -- "${BASH_SOURCE[0]}")/base.sh"\n'


@pytest.fixture
def bash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Bash(tmp_path)


def test_words_of_written_scripts_are_those_of_bash(bash, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "base.sh").write_text(BASE)
    (tmp_path / "models" / "variant.sh").write_text(VARIANT)
    outcomes = {name: bash.compared(f"N=$#\n{text}") for name, text in SCRIPTS.items()}
    assert len(outcomes) > 40
    assert {name: one for name, one in outcomes.items() if name.startswith("read: ") and one != "equal"} == {}
    assert {name: one for name, one in outcomes.items() if one not in ("equal", "unresolved", "ended")} == {}


@pytest.mark.timeout(max(600, CASES))
def test_words_of_made_scripts_are_those_of_bash_or_not_known(bash):
    outcomes = Counter()
    different = {}
    for number in range(CASES):
        outcome = bash.compared(script(number))
        outcomes[outcome.partition(":")[0]] += 1
        if outcome.startswith("differ"):
            different[number] = outcome
    print(dict(outcomes))
    assert not different
    assert min(outcomes["equal"] / CASES, 5 * outcomes["unresolved"] / CASES) > 0.5


TRAIN = "python3 train.py --load /x ${MODEL_ARGS[@]}\n"


@pytest.mark.parametrize("source", ["set -ex\nsource models/base.sh\n", "set -o errexit\n. ./models/base.sh\n"])
def test_file_that_is_sourced_and_missing_ends_the_launch(source, bash, tmp_path):
    bash.run.write_text(source + TRAIN)
    done = subprocess.run(["bash", bash.run], capture_output=True, text=True, env=bash.environment, check=False)
    assert (done.returncode, "models/base.sh" in done.stderr) == (1, True)
    (issue,) = read_script(bash.run, environment=bash.environment).issues
    assert "models/base.sh" in issue.actual
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "base.sh").write_text("MODEL_ARGS=(--num-layers 2)\n")
    read = read_script(bash.run, environment=bash.environment)
    assert (read.issues, read.unresolved) == ((), ())


@pytest.mark.parametrize(
    "source",
    [
        "source models/base.sh\n",
        "set -e\nsource models/base.sh || true\n",
        "set -e\nset +e\nsource models/base.sh\n",
        "set -e\nsource /opt/nosuch/models/base.sh\n",
        "set -e\nmkdir -p models\ncat > models/base.sh <<E\nMODEL_ARGS=(--num-layers 2)\nE\nsource models/base.sh\n",
    ],
)
def test_file_that_need_not_be_there_is_not_known(source, bash):
    """Without `set -e` the script goes on; another machine's file, and one that the script writes, are not missed."""
    bash.run.write_text(source + TRAIN)
    read = read_script(bash.run, environment=bash.environment)
    assert read.issues == ()
    assert any("${MODEL_ARGS[@]}" in line for line in read.unresolved)
