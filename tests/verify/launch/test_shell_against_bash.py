"""Scripts that bash reads in ways easily mistaken: our words are those of bash, or not known; never others."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.launch.shell.read import read_script
from ckptkit.verify.launch.words import LaunchText, UnresolvedWord

BASH = shutil.which("bash")
PRINT = "python3() { shift; printf '%s\\0' \"$@\"; }\n"
TRAIN = "python3 train.py --load "
ARGUMENTS = ("--tp", "2")
ENVIRONMENT = {"HOME": "/home/me", "PATH": "/usr/bin:/bin"}
# Scripts of model arguments in the shapes that slime's have: loops, sums, blanks at line ends, comments, variants.
MODELS = {
    "base": (
        'COUNT="${MODEL_LAYERS:-61}"\nDENSE=3\nEXPERT=1408\nBOTH=$(($EXPERT * 2))\n\nlist=()\n'
        "for ((n=0; n<COUNT; n++)); do\n  if (( n < DENSE )); then\n    list+=(0)\n  else\n    list+=(1)\n  fi\ndone\n"
        'printf -v FREQUENCY "[%s]" "$(IFS=\', \'; echo "${list[*]}")"\n'
        'MODEL_ARGS=(\n  --spec plugin make\n  --num-layers $COUNT   \n\n  # experts\n  --moe-layer-freq "$FREQUENCY"\n'
        "  --moe-ffn-hidden-size ${BOTH}\n  --rotary-base ${BASE:-10000}\n)"
    ),
    "variant": 'MODEL_LAYERS=5 BASE=5000000 source "$(dirname -- "${BASH_SOURCE[0]}")/base.sh"\n',
    "changed": 'source "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/base.sh"\nMODEL_ARGS[1]="other"\n',
}
# Read as bash reads them. Those that give no words end before the trainer starts.
READ = {
    "seq": "python3 train.py --a $(seq 3) --b $(seq 2 4) --c $(seq 16 8 40) --d $(seq 5 -2 0) --e $(seq 4 3) x",
    "quotes": "python3 train.py --a 'x y' \"z  $HOME-\\$\" a\"b\"'c' \"\" --e='1 2' \\\"q $'t\\tn'",
    "continuation": ("python3 train.py --a \\\n  1 --b\\\n2 \\\n\n"),
    "array of lines": ("A=(\n  --a 1 # one\n  # --b 2\n  --c 3 \\\n  --d\n)\npython3 train.py ${A[@]}"),
    "trimming": ("F=/a/b.tar.gz\npython3 train.py ${F##*/} ${F%.*} ${F%%.*} ${F#*/} ${F/b/c} ${F//a/z} ${F:1:3} ${#F}"),
    "arithmetic": (
        "N=3\npython3 train.py $((N + 89)) $(( (N*2) % 4 )) $((N > 2 ? 10 : 20)) $((2**10)) $((-7 / 2)) $((0x10))"
    ),
    "precedence": "python3 train.py $((1 + 2 * 3 - 4 / 2)) $((1 << 2 + 1)) $((!0 && 1 || 0)) $((7 & 3 | 8 ^ 1))",
    "for numbers": (
        "A=()\n"
        "for ((i = 0; i < 6; i++)); do if (( i < 2 )); then A+=(0); else A+=(1); fi; done\n"
        'printf -v F "[%s]" "$(IFS=", "; echo "${A[*]}")"\n'
        'python3 train.py --moe-layer-freq "$F"'
    ),
    "heredoc": (
        'A=x\nB=$(cat <<EOF\n{ "a": "$A (b)" }\nEOF\n)\nC=$(cat <<\'EOF\'\n$A ) \'\nEOF\n)\npython3 train.py "$B" "$C"'
    ),
    "heredoc skipped": ("cat <<EOF >/dev/null\npython3 train.py --no\nEOF\npython3 train.py --yes"),
    "printf": (
        "printf -v A '%s,' 1 2 3\nprintf -v B '%02d-%s' 7 x\npython3 train.py $A $B $(printf '%d' 5) $(printf x%%)"
    ),
    "functions": (
        'f() { local a=$1; echo "$a-$2"; }\n'
        "function g { A=$1; return; A=no; }\n"
        "g yes\n"
        'python3 train.py $(f 1 "2 3") "$(f x)" $A'
    ),
    "options in a loop": (
        "set -- --tp 4 --pp 2\n"
        'while [[ $# -gt 0 ]]; do case "$1" in --tp) TP=$2; shift 2;; *) A+=("$1"); shift;; esac; done\n'
        "python3 train.py $TP ${A[@]}"
    ),
    "pattern of layers": ("D=1 M=2\npython3 train.py --moe-layer-freq [0]*$D+[1]*$M"),
    "exports": ('export A=1 B="2 3"\ndeclare -a C=(4 5)\nreadonly D=6\npython3 train.py $A "$B" ${C[@]} $D'),
    "nested quotes in braces": 'python3 train.py "${A:-"x y"}" "${A:-a}b"',
    "stops": ("set -e\ntrap 'echo x' ERR\nulimit -c 0\npython3 train.py --a 1"),
    **{
        f"model arguments: {name}": f'source "$(dirname "$0")/models/{name}.sh"\npython3 train.py ${{MODEL_ARGS[@]}}'
        for name in MODELS
    },
    "return of a sourced file": f"A=x\nsource ./fails.sh || A=y\n{TRAIN}$A",
    "sed of several texts": f"A=$(echo Qwen3-VL-2B-2B | sed 's/-VL//; s#Q#q#g ;s/-2B/-1.7B/g; s/w/v/')\n{TRAIN}$A",
    "own arguments counted": '[ $# -gt 5 ] && A=1\npython3 train.py --n "${A:-0}"',
    "break 2 of endless loops": f"while true; do while true; do break 2; done; A=1; done\n{TRAIN}${{A:-0}}",
    "patterns of layers": 'A=("Et*3|(tt|)*29,m|L" "[0]*3+[1]*58" MEMEM*EM/*E)\npython3 train.py ${A[@]} M-M-M*M-',
    "ANSI quotes": "python3 train.py $'a\\x41\\'b\\101\\e\\n' x",
    "set -e and counting from zero": "set -e\ni=0\n((i++))\npython3 train.py $i",
    "output to a file": f"X=$(echo hi >/dev/null)\nY=$(echo err 2>/dev/null >&2)\n{TRAIN}a$X$Y",
    "output of a group to a file": f"X=$({{ echo hi; }} >/dev/null)\n{TRAIN}a$X",
    "local without a value": f"A=1\nf() {{ local A; B=${{A:-none}}; }}\nf\n{TRAIN}$A$B",
    "declare -g": f"f() {{ declare -g A=1; }}\nf\n{TRAIN}$A",
    "quoted patterns": (
        'case "a*" in "a*") A=1;; esac\ncase ab in "a*") B=1;; esac\n[[ ab == "a*" ]] && C=1\n[[ ab == a* ]] && D=1\n'
        'P="a*"\n[[ ab == $P ]] && E=1\n[[ ab == "$P" ]] && F=1\n'
        "python3 train.py ${A:-0} ${B:-0} ${C:-0} ${D:-0} ${E:-0} ${F:-0}"
    ),
    "parts that are not evaluated": (
        "x=1\ny=$((0 && (x=5)))\nz=$((1 || x++))\nw=$((1 ? 2 : (x=9)))\nv=$((0 && 1 / 0))\n"
        "python3 train.py $x $y $z $w $v"
    ),
    "home of the script": "HOME=/h\npython3 train.py ~/x ~ --load=~/x",
    "a comparison without a left side": f"B=\nA=1\n[ $B = x ] || A=2\n{TRAIN}$A",
    "return out of a loop": "set -e\nf() { for i in 1 2; do return 1; done; }\nf\npython3 train.py --a",
    "a loop that ends with a condition": "set -e\nf() { for i in 1; do [ 2 = 1 ] && :; done; }\nf\n"
    "python3 train.py --a",
    "a backslash that ends the file": "python3 train.py --a 1 \\",
    "one value in two branches": f"if [ -d /nosuch ]; then A=1; else A=1; fi\n{TRAIN}$A",
}
# Not followed so far: not known, where they are not read as bash reads them.
UNKNOWN = {
    "an element before the first": f"A=(1)\nA[-3]=2\n{TRAIN}x",
    "let of an element": f"A=(1 2)\nlet A[0]=5\n{TRAIN}${{A[@]}}",
    "IFS that depends on a condition": f"A='b c'\n[ -e /nosuch ] && IFS=,\n{TRAIN}$A",
    "declare -u": f"declare -u N=abc\n{TRAIN}$N",
    "declare -n": f"A=1\ndeclare -n B=A\nB=2\n{TRAIN}$A",
    "break that may be": f"B=1\nfor i in 1 2 3; do [ -d /nosuch ] && break; [ $i = 3 ] && B=9; done\n{TRAIN}$B",
    "counting in a loop": f"B=1\ni=0\nfor f in $(hostname) x y; do ((i++)); [ $i = 2 ] && B=2; done\n{TRAIN}$B",
    "return that may be": f"f() {{ [ -d /nosuch ] && return 0; A=1; return 1; }}\nB=2\nf && B=3\n{TRAIN}$B",
    "braces in braces": f"{TRAIN}{{a,{{b}}}}",
    "braces of options": "python3 train.py --{load,save} /x",
    "option of a command": "O=$(hostname)\npython3 train.py --$O /x",
    "extended patterns": f"[[ b == @(a|b) ]] && A=1\n{TRAIN}${{A:-0}}",
    "octal that is none": f"A=08\n{TRAIN}$((A + 1))",
    "or-assignment": f"x=1\n((x |= 2))\n{TRAIN}$x",
    "counting of an element": f"A=(1 2)\n((A[0]++))\n{TRAIN}${{A[0]}}",
    "digits of Python": f"A=1_0\n{TRAIN}$((A))",
    "echo -e": f'A=$(echo -e "a\\tb")\n{TRAIN}"$A"',
    "escapes of printf": f"A=$(printf 'a\\101')\n{TRAIN}\"$A\"",
    "replacing by what was found": f'A=abc\n{TRAIN}"${{A/b/[&]}}"',
    "pattern of files": f"{TRAIN}./mo*.sh",
    "home of another": f"{TRAIN}~root/x",
    "read with escapes": f'read a <<< "x\\ty"\n{TRAIN}$a',
    "read of empty fields": f'IFS=, read -ra A <<< "a,,b"\n{TRAIN}"${{A[1]}}"',
    "empty words by IFS": 'IFS=,\nA="1,,2"\npython3 train.py --load $A',
    "letters of either case": f"shopt -s nocasematch\n[[ A == a ]] && A=1\n{TRAIN}${{A:-0}}",
}


def given(script: str, folder: Path) -> tuple[list[str], LaunchText | None]:
    """What bash gives to the trainer, and what we read: None where we say that no trainer starts."""
    (folder / "more.sh").write_text("MORE=m${1:-none}\n")
    (folder / "fails.sh").write_text("return 1\n")
    (folder / "models").mkdir()
    for name, text in MODELS.items():
        (folder / "models" / f"{name}.sh").write_text(text)
    file = folder / "run.sh"
    file.write_text(PRINT + script)
    command = [str(BASH), str(file), *ARGUMENTS]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=folder, check=False)
    file.write_text(script)
    try:
        return done.stdout.split("\0")[:-1], read_script(file, None, ARGUMENTS, ENVIRONMENT)
    except CkptkitError:
        return done.stdout.split("\0")[:-1], None


def words_of(read: LaunchText | None, script: str) -> list[str]:
    """The words of a launch, less the arguments that come behind those of a script that uses none."""
    words = [word.text for word in read.words] if read else []
    uses = any(sign in script for sign in ("$@", "${@", "$#", "for one;", "set --", "more.sh"))
    return words if uses or not words else words[: -len(ARGUMENTS)]


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
@pytest.mark.parametrize("name", READ)
def test_words_are_those_of_bash(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wanted, read = given(READ[name], tmp_path)
    assert words_of(read, READ[name]) == wanted
    unknown = [word for word in read.words if isinstance(word, UnresolvedWord)] if read else []
    assert (read.unresolved if read else (), unknown) == ((), [])


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
@pytest.mark.parametrize("name", UNKNOWN)
def test_words_are_those_of_bash_or_not_known(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wanted, read = given(UNKNOWN[name], tmp_path)
    assert words_of(read, UNKNOWN[name]) == wanted or (read is not None and read.unresolved)


SOURCES = {"set -e": "set -ex\nsource models/base.sh\n", "bash -e": "set -o errexit\n. ./models/base.sh\n"}


@pytest.mark.parametrize("name", SOURCES)
def test_file_that_is_sourced_and_missing_ends_the_launch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "run.sh"
    script.write_text(f"{SOURCES[name]}{TRAIN}/x ${{MODEL_ARGS[@]}}\n")
    if BASH:
        command = [BASH, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path, check=False)
        assert (done.returncode, "models/base.sh" in done.stderr) == (1, True)
    (issue,) = read_script(script, environment=ENVIRONMENT).issues
    assert "models/base.sh" in issue.actual
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "base.sh").write_text("MODEL_ARGS=(--num-layers 2)\n")
    read = read_script(script, environment=ENVIRONMENT)
    assert (read.issues, read.unresolved) == ((), ())


@pytest.mark.parametrize(
    "script",
    [
        "source models/base.sh\n",
        "set -e\nsource models/base.sh || true\n",
        "set -e\nif source models/base.sh; then :; fi\n",
        "set -e\nset +e\nsource models/base.sh\n",
        "set -e\nsource /opt/nosuch/models/base.sh\n",
        "set -e\nmkdir -p models\ncat > models/base.sh <<E\nMODEL_ARGS=(--num-layers 2)\nE\nsource models/base.sh\n",
    ],
)
def test_file_that_need_not_be_there_is_not_known(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `set -e` the script goes on; another machine's file, and one that the script writes, are not missed."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.sh"
    file.write_text(f"{script}{TRAIN}/x ${{MODEL_ARGS[@]}}\n")
    read = read_script(file, environment=ENVIRONMENT)
    assert read.issues == ()
    assert any("${MODEL_ARGS[@]}" in line for line in read.unresolved)
