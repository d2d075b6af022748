"""The reader of bash, held against bash itself: the words that a trainer gets, without any of it being run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from verify.launch.shell.read import read_script
from verify.launch.words import UnresolvedWord, known_words

BASH = shutil.which("bash")
# Prints every word of the trainer, so that bash says what it would have given to it.
PRINT = "python3() { shift; printf '%s\\0' \"$@\"; }\n"
SCRIPTS = {
    "quotes": "python3 train.py --a 'x y' \"z  $HOME-\\$\" a\"b\"'c' \"\" --e='1 2' \\\"q $'t\\tn'",
    "comments": ("# python3 train.py\npython3 train.py --a 1 # --b 2\n"),
    "continuation": ("python3 train.py --a \\\n  1 --b\\\n2 \\\n\n"),
    "arrays": (
        'A=(1 "2 3" \'4\')\nA+=(5)\nB=("${A[@]}" x)\npython3 train.py ${A[@]} "${B[@]}" "${#B[@]}" ${B[1]} "${B[*]}"'
    ),
    "array of lines": ("A=(\n  --a 1 # one\n  # --b 2\n  --c 3 \\\n  --d\n)\npython3 train.py ${A[@]}"),
    "empty array": ('A=()\npython3 train.py ${A[@]} "${A[@]}" x"${A[@]}"y'),
    "element": ("A=(1 2 3)\nA[1]=x\nA[3]=y\ni=2\npython3 train.py ${A[@]} ${A[i]} ${A[i+1]} ${A[-1]}"),
    "splitting": ('X="a  b c"\nY=" p q "\npython3 train.py $X "$X" x${Y}y $Y'),
    "empty words": ('X=\npython3 train.py $X "$X" a$X'),
    "defaults": ('A=1\npython3 train.py ${A:-2} ${B:-"x y"} ${B-z} ${A:+set} ${B:+set} ${C:=new} $C ${A-q}'),
    "nested defaults": "python3 train.py ${A:-${B:-${C:-deep}}} ${A:-$((1 + 2))}",
    "trimming": ("F=/a/b.tar.gz\npython3 train.py ${F##*/} ${F%.*} ${F%%.*} ${F#*/} ${F/b/c} ${F//a/z} ${F:1:3} ${#F}"),
    "letters": ("A=Qwen3\npython3 train.py ${A,,} ${A^^}"),
    "arithmetic": (
        "N=3\npython3 train.py $((N + 89)) $(( (N*2) % 4 )) $((N > 2 ? 10 : 20)) $((2**10)) $((-7 / 2)) $((0x10))"
    ),
    "precedence": "python3 train.py $((1 + 2 * 3 - 4 / 2)) $((1 << 2 + 1)) $((!0 && 1 || 0)) $((7 & 3 | 8 ^ 1))",
    "counters": ("i=5\n((i++))\n((i += 10))\nj=$((i--))\nlet_=$((++j))\npython3 train.py $i $j $let_"),
    "for words": ('X=""\nfor n in 1 2 "3 4"; do X+="[$n]"; done\npython3 train.py $X "$X"'),
    "for numbers": (
        "A=()\n"
        "for ((i = 0; i < 6; i++)); do if (( i < 2 )); then A+=(0); else A+=(1); fi; done\n"
        'printf -v F "[%s]" "$(IFS=", "; echo "${A[*]}")"\n'
        'python3 train.py --moe-layer-freq "$F"'
    ),
    "while": ("i=0\nL=\nwhile [ $i -lt 4 ]; do L=$L$i,; i=$((i + 1)); done\npython3 train.py [${L%,}]"),
    "until": ("i=3\nuntil [[ $i == 0 ]]; do i=$((i - 1)); A+=($i); done\npython3 train.py ${A[@]}"),
    "break and continue": (
        "for i in 1 2 3 4 5; do [ $i = 2 ] && continue; [ $i -ge 4 ] && break; A+=($i); done\npython3 train.py ${A[@]}"
    ),
    "if": (
        "A=8\nif [ $A -gt 8 ]; then B=1; elif [[ $A == [0-9] && -n $A ]]; then B=2; else B=3; fi\npython3 train.py $B"
    ),
    "tests": (
        "NONE= D=0\n"
        '[ -z "$NONE" ] && A=1\n'
        '[ "$A" = 1 -a x != y ] && B=2\n'
        "[[ ! ( a == b ) ]] && C=3\n"
        "test $B -eq 2 || D=4\n"
        "python3 train.py $A $B $C $D"
    ),
    "case": (
        "M=qwen3-moe\ncase $M in *-moe|*-MoE) E=8;; *) E=1;; esac\nF=0\ncase x in y) F=1;; esac\npython3 train.py $E $F"
    ),
    "functions": (
        'f() { local a=$1; echo "$a-$2-$#"; }\n'
        "function g { A=$1; return; A=no; }\n"
        "g yes\n"
        'python3 train.py $(f 1 "2 3") "$(f x)" $A'
    ),
    "local": ("a=out\nf() { local a=in; b=$a; }\nf\npython3 train.py $a $b"),
    "subshell": ("A=1\n( A=2; cd / )\n{ B=3; }\npython3 train.py $A $B"),
    "pipeline": ("A=1\necho x | { A=2; }\npython3 train.py --a $A 2>&1 | cat"),
    "redirections": "python3 train.py --a 1 2>/dev/null --b 2",
    "heredoc": (
        'A=x\nB=$(cat <<EOF\n{ "a": "$A (b)" }\nEOF\n)\nC=$(cat <<\'EOF\'\n$A ) \'\nEOF\n)\npython3 train.py "$B" "$C"'
    ),
    "heredoc skipped": ("cat <<EOF >/dev/null\npython3 train.py --no\nEOF\npython3 train.py --yes"),
    "here string": (
        'L="--a 1  --b 2"\nread -ra A <<< "$L"\nIFS=, read -r -a B <<< "x,y"\npython3 train.py ${A[@]} ${B[@]}'
    ),
    "printf": (
        "printf -v A '%s,' 1 2 3\nprintf -v B '%02d-%s' 7 x\npython3 train.py $A $B $(printf '%d' 5) $(printf x%%)"
    ),
    "source": (
        'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
        'source "${HERE}/more.sh"\n'
        '. $(dirname "$0")/more.sh\n'
        'python3 train.py $MORE "$(basename "$MORE")"'
    ),
    "backticks": ("A=`echo 1 \\`echo 2\\``\npython3 train.py $A"),
    "set and shift": ('set -- a "b c" d\nshift\npython3 train.py "$@" $# $1 $*'),
    "options in a loop": (
        "set -- --tp 4 --pp 2\n"
        'while [[ $# -gt 0 ]]; do case "$1" in --tp) TP=$2; shift 2;; *) A+=("$1"); shift;; esac; done\n'
        "python3 train.py $TP ${A[@]}"
    ),
    "unset": ("A=1\nunset A\npython3 train.py ${A:-gone}"),
    "joined by IFS": ('A=(1 2 3)\nIFS=+\nB="${A[*]}"\nunset IFS\npython3 train.py "$B"'),
    "pattern of layers": ("D=1 M=2\npython3 train.py --moe-layer-freq [0]*$D+[1]*$M"),
    "and or": ("true && A=1 || A=2\nfalse || B=3\n! true || C=4\npython3 train.py $A $B $C"),
    "one line": "A=1; B=2; python3 train.py $A $B; C=3",
    "background": ("sleep 0 & python3 train.py --a 1 &\nwait"),
    "append": ("A=x\nA+=y\nA+=$A\npython3 train.py $A"),
    "exports": ('export A=1 B="2 3"\ndeclare -a C=(4 5)\nreadonly D=6\npython3 train.py $A "$B" ${C[@]} $D'),
    "nested quotes in braces": 'python3 train.py "${A:-"x y"}" "${A:-a}b"',
    "eval": ("eval 'A=1; B=2'\npython3 train.py $A $B"),
    "length of text": ("A=abc\npython3 train.py ${#A}"),
    "exit in a branch": ("if false; then exit 1; fi\npython3 train.py --a 1"),
    "stops": ("set -e\ntrap 'echo x' ERR\nulimit -c 0\npython3 train.py --a 1"),
}


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_that_bash_gives(name: str, tmp_path: Path) -> None:
    script, environment = tmp_path / "run.sh", {"HOME": "/home/me", "PATH": "/usr/bin:/bin"}
    (tmp_path / "more.sh").write_text("MORE=/models/qwen\n")
    script.write_text(PRINT + SCRIPTS[name])
    command = [str(BASH), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    wanted = done.stdout.split("\0")[:-1]
    assert wanted, done.stderr
    script.write_text(SCRIPTS[name])
    read = read_script(script, environment=environment)
    assert [word.text for word in read.words] == wanted
    assert read.unresolved == ()
    assert not any(isinstance(word, UnresolvedWord) for word in read.words)


# What bash would have to run, or ask the machine, to know; the word as it stands, and why.
UNKNOWN = [
    ("python3 train.py --load $(hostname)", "$(hostname)", "the output of `hostname`"),
    ("N=$(nproc)\npython3 train.py --load $N", "${N}", "the output of `nproc`"),
    ("python3 train.py --load $NOBODY/x", "$NOBODY/x", "set neither in the script"),
    ("python3 train.py --load $RANDOM", "$RANDOM", "known only when the script runs"),
    ("python3 train.py --load a{1,2}", "a{1,2}", "braces are not expanded here"),
    ("python3 train.py --load $((N / 0))", "$((N / 0))", "divides by zero"),
    ("python3 train.py --load $(echo a | tr a b)", "$(echo a | tr a b)", "the output of other commands"),
    ("[ -d /x ] && A=1 || A=2\npython3 train.py --load $A", "$A", "depends on a condition at"),
    ("for f in $(ls); do A=$f; done\npython3 train.py --load $A", "$A", "depends on a loop at"),
    ("declare -A A=([x]=1)\npython3 train.py --load ${A[x]}", "$A", "an array with indices"),
    ("A=1\nread A < file\npython3 train.py --load $A", "$A", "read at"),
    ("mapfile -t A < file\npython3 train.py --load ${A[0]}", "$A[@]", "mapfile at"),
    ("A=${B:?no}\npython3 train.py --load $A", "$A", "the script stops"),
]


@pytest.mark.parametrize(("text", "word", "why"), UNKNOWN)
def test_word_that_only_running_tells_is_unresolved(text: str, word: str, why: str) -> None:
    read = read_script(None, text, environment={})
    (found,) = [one for one in read.words if isinstance(one, UnresolvedWord)]
    assert word in (found.text, found.text.replace("{", "").replace("}", ""))
    assert why in found.why
    assert len(read.unresolved) == 1
    assert why in read.unresolved[0]


def test_option_that_no_check_reads_may_be_unknown() -> None:
    read = read_script(None, "python3 train.py --wandb-key ${KEY} --wandb-group $(date +%s) --lr 1", environment={})
    assert read.unresolved == ()
    assert [word.text for word in read.words if isinstance(word, UnresolvedWord)] == ["${KEY}", "$(date +%s)"]


def test_places_are_where_the_words_are_written(tmp_path: Path) -> None:
    (tmp_path / "model.sh").write_text("N=3\nM=(\n  --a 1\n  --b $N\n)\n")
    script = tmp_path / "run.sh"
    script.write_text(f"source {tmp_path}/model.sh\nX='--c 5'\npython3 train.py \\\n  ${{M[@]}} $X \\\n  --d 6\n")
    read = read_script(script, environment={})
    places = {word.text: word.place.removeprefix(f"{tmp_path}/") for word in read.words}
    assert places == {
        "--a": "model.sh:3",
        "1": "model.sh:3",
        "--b": "model.sh:4",
        "3": "model.sh:1",
        "--c": "run.sh:2",
        "5": "run.sh:2",
        "--d": "run.sh:5",
        "6": "run.sh:5",
    }


def test_environment_of_a_trainer_is_what_was_exported_and_given_to_ray() -> None:
    text = """
    export A=1
    B=2
    RUNTIME='{"env_vars": {"C": "3", "A": "4"}}'
    D=5 ray job submit --runtime-env-json="$RUNTIME" -- E=6 python3 train.py --lr 1
    """
    read = read_script(None, text, environment={})
    assert {name: word.text for name, word in read.environment.items()} == {"A": "4", "C": "3", "D": "5", "E": "6"}


def test_environment_that_is_no_json_is_unresolved() -> None:
    read = read_script(None, "ray job submit --runtime-env-json '{' -- python3 train.py --lr 1", environment={})
    assert read.unresolved == ("the text: --runtime-env-json: its text is not known, or is not JSON",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python3 -m verl.trainer.main_ppo a.b=1", ["a.b=1"]),
        ("nohup python3 -u /opt/slime/train_async.py --lr 1 > log &", ["--lr", "1"]),
        ("torchrun --nproc-per-node 8 pretrain_gpt.py --lr 1", ["--lr", "1"]),
        ("docker run image bash -lc 'cd /x; python train.py --lr 1'", ["--lr", "1"]),
        ("./train.py --lr 1", ["--lr", "1"]),
        ("pkill -f train.py; echo python train.py; python train.py --lr 1", ["--lr", "1"]),
    ],
)
def test_trainers_are_known_however_they_are_started(text: str, words: list[str]) -> None:
    assert [word.text for word in read_script(None, text, environment={}).words] == words


def test_options_without_a_known_value_are_left_out_and_switches_stay() -> None:
    text = "[ -f x ] && M=(--pp 2)\npython3 train.py --swiglu ${M[@]} --load $A --lr 1 --fp16 $EXTRA_ARGS"
    read = read_script(None, text, environment={})
    assert [word.text for word in known_words(read.words)] == ["--swiglu", "--lr", "1", "--fp16"]


@pytest.mark.parametrize(
    "words", ["--decoder-last-pipeline-num-layers $X", "--megatron-config-path $X", "--tp $X", "--load=$X"]
)
def test_unknown_value_of_an_option_that_matters_is_never_passed_over(words: str) -> None:
    read = read_script(None, f"python3 train.py {words}", environment={})
    assert len(read.unresolved) == 1
    assert "$X" in read.unresolved[0]


def test_int4_training_of_an_unknown_variable_is_unresolved() -> None:
    text = "export OPEN_TRAINING_INT4_GROUP_SIZE=$SIZE\npython3 train.py --lr 1"
    (line,) = read_script(None, text, environment={}).unresolved
    assert line.startswith("the text:") or "OPEN_TRAINING_INT4_GROUP_SIZE" in line


def test_relative_paths_follow_the_scripts_directory(tmp_path: Path) -> None:
    read = read_script(None, f"cd {tmp_path}\npython3 train.py --load run --ref-load=/a --lr x", environment={})
    assert [word.text for word in read.words] == ["--load", f"{tmp_path}/run", "--ref-load=/a", "--lr", "x"]
    read = read_script(None, "cd $NOWHERE\npython3 train.py --load run", environment={})
    assert "relative to a directory that is not known" in read.unresolved[0]
