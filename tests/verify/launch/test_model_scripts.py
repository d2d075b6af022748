"""Scripts of model arguments in the shapes that slime's and miles' have: every word is known, as bash has it."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from verify.launch.options.given import given_arguments
from verify.launch.shell.read import read_script
from verify.launch.words import LaunchText

BASH = shutil.which("bash")
# slime: how a script says which layers are dense.
LAYERS = {
    "none": ("", "--num-layers 28"),
    "a loop": (
        'COUNT="${MODEL_LAYERS:-61}"\nDENSE=3\n\nlist=()\nfor ((n=0; n<COUNT; n++)); do\n  if (( n < DENSE )); then\n'
        "    list+=(0)\n  else\n    list+=(1)\n  fi\ndone\n\n"
        'printf -v FREQUENCY "[%s]" "$(IFS=\', \'; echo "${list[*]}")"\n',
        '--num-layers $COUNT\n    --num-experts 64\n    --moe-layer-freq "$FREQUENCY"',
    ),
    "sums": (
        "DENSE=1\nSPARSE=45\n",
        "--num-layers $((DENSE + SPARSE))\n    --num-experts 64\n    --moe-layer-freq [0]*$DENSE+[1]*$SPARSE",
    ),
}
# How it says sizes, with blanks at line ends, empty lines and comments among the arguments.
SIZES = {
    "numbers": ("", "--hidden-size 2048\n    --ffn-hidden-size 6144"),
    "products": (
        "SHARED=2\nEXPERT=1408\nWIDTH=2048\nALL=$(($EXPERT * $SHARED))\nBOTH=$((EXPERT * SHARED))\n",
        "--hidden-size $WIDTH   \n\n    # experts\n    --moe-shared-expert-intermediate-size $ALL\n"
        "    --moe-ffn-hidden-size ${BOTH}",
    ),
}
# How the file of the launch comes to them.
SOURCES = {
    "beside it": 'source "$HERE/models/base.sh"',
    "a variant": 'source "${HERE}/models/variant.sh"',
    "a variant that changes words": 'source "$HERE/models/changed.sh"',
}
SHAPES = list(itertools.product(LAYERS, SIZES, SOURCES))
# miles: one line of words, which a definition in Python makes.
LINES = [
    "--swiglu --num-layers 36 --hidden-size 2560 --norm-epsilon 1e-06 --rotary-base 1000000 --vocab-size 151936",
    "--num-layers 46 --hidden-size 2048 --num-experts 64 --moe-layer-freq [0]*1+[1]*45 --norm-epsilon 1e-5",
    "--spec plugins.models.glm get_spec --num-layers 6 --hidden-size 64 --num-experts 4 --moe-layer-freq [0,0,1,1,1,1]",
]


def write_models(folder: Path, layers: str, sizes: str) -> Path:
    """Writes `models/` and `run.sh`, which has SOURCE where it sources one of them. Returns `run.sh`."""
    (before, first), (constants, second) = LAYERS[layers], SIZES[sizes]
    arguments = (
        f"MODEL_ARGS=(\n    --spec plugin make\n    {first}\n    {second}\n    --rotary-base ${{BASE:-10000}}\n)"
    )
    (folder / "models").mkdir()
    (folder / "models" / "base.sh").write_text(f"{before}{constants}\n# the model\n{arguments}")
    here = "${BASH_SOURCE[0]}"
    (folder / "models" / "variant.sh").write_text(
        f'MODEL_LAYERS=5 BASE=5000000 source "$(dirname -- "{here}")/base.sh"\n'
    )
    (folder / "models" / "changed.sh").write_text(
        f'source "$(cd -- "$(dirname -- "{here}")" && pwd)/base.sh"\nMODEL_ARGS[1]="other"\nMODEL_ARGS[2]="another"\n'
    )
    return folder / "run.sh"


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
@pytest.mark.parametrize(("layers", "sizes", "source"), SHAPES)
def test_words_of_a_model_script_are_all_known(layers: str, sizes: str, source: str, tmp_path: Path) -> None:
    script = write_models(tmp_path, layers, sizes)
    here = 'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
    text = f"{here}{SOURCES[source]}\npython3 train.py ${{MODEL_ARGS[@]}}\n"
    environment = {"PATH": "/usr/bin:/bin"}
    script.write_text("python3() { shift; printf '%s\\0' \"$@\"; }\n" + text)
    command = [str(BASH), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=True)
    script.write_text(text)
    read = read_script(script, environment=environment)
    assert [word.text for word in read.words] == done.stdout.split("\0")[:-1]
    assert_known(read)


@pytest.mark.parametrize("line", LINES)
def test_words_of_a_model_definition_are_all_known(line: str) -> None:
    read = read_script(None, f"python3 train.py {line}\n", (), {})
    assert [word.text for word in read.words] == line.split()
    assert_known(read)


def assert_known(read: LaunchText) -> None:
    given = given_arguments(read.words)
    assert (read.unresolved, read.issues) == ((), ())
    assert (given.anything, set(given.unknown), list(given.refused)) == (False, set(), [])
    assert given.describes_model


def test_definition_that_python_would_have_to_print_is_unresolved(tmp_path: Path) -> None:
    """miles' launches in bash get their model arguments so: they are run by nobody here."""
    (tmp_path / "run.sh").write_text(
        'LINE="$(python3 miles/tools/model_args.py qwen3-4B)" || exit 1\nread -ra MODEL_ARGS <<< "${LINE}"\n'
        "python3 train.py --hf-checkpoint /x ${MODEL_ARGS[@]}\n"
    )
    read = read_script(tmp_path / "run.sh", environment={})
    (line,) = read.unresolved
    assert "${MODEL_ARGS[@]}" in line
    assert "the output of `python3`" in line
