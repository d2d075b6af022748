"""What the reader of bash does not know, where words are written, and how a trainer is started."""

import pytest
from support.messages import text_with

from ckptkit.verify.launch.shell.read import read_script
from ckptkit.verify.launch.words import UnresolvedWord

# What bash would have to run, or ask the machine, to know; the word as it stands, and why.
UNKNOWN = [
    ("python3 train.py --load $(hostname)", "$(hostname)", "the output of `hostname`"),
    ("python3 train.py --load $NOBODY/x", "$NOBODY/x", "neither"),
    ("python3 train.py --load $RANDOM", "$RANDOM", "only the running"),
    ("python3 train.py --load $((N / 0))", "$((N / 0))", "divides by zero"),
    ("python3 train.py --load $(echo a | tr a b)", "$(echo a | tr a b)", "other commands"),
    ("[ -d /x ] && A=1 || A=2\npython3 train.py --load $A", "$A", "a condition at"),
    ("for f in $(ls); do A=$f; done\npython3 train.py --load $A", "$A", "a loop at"),
    ("A=1\nread A < file\npython3 train.py --load $A", "$A", "read at"),
]


@pytest.mark.parametrize(("text", "word", "why"), UNKNOWN)
def test_word_that_only_running_tells_is_unresolved(text, word, why):
    read = read_script(None, text, environment={})
    (found,) = [one for one in read.words if isinstance(one, UnresolvedWord)]
    assert word in (found.text, found.text.replace("{", "").replace("}", ""))
    assert why in found.why
    assert len(read.unresolved) == 1
    assert why in read.unresolved[0]


def test_option_that_no_check_reads_may_be_unknown():
    read = read_script(None, "python3 train.py --wandb-key ${KEY} --wandb-group $(date +%s) --lr 1", environment={})
    assert read.unresolved == ()
    assert [word.text for word in read.words if isinstance(word, UnresolvedWord)] == ["${KEY}", "$(date +%s)"]


def test_places_are_where_the_words_are_written(tmp_path):
    (tmp_path / "model.sh").write_text("N=3\nM=(\n  --a 1\n  --b $N\n)\n")
    script = tmp_path / "run.sh"
    script.write_text(f"source {tmp_path}/model.sh\nX='--c 5'\npython3 train.py \\\n  ${{M[@]}} $X \\\n  --d 6\n")
    read = read_script(script, environment={})
    places = {word.text: word.place.removeprefix(f"{tmp_path}/") for word in read.words}
    of_model = {"--a": "model.sh:3", "1": "model.sh:3", "--b": "model.sh:4", "3": "model.sh:1"}
    assert places == of_model | {"--c": "run.sh:2", "5": "run.sh:2", "--d": "run.sh:5", "6": "run.sh:5"}


def test_environment_of_a_trainer_is_what_was_exported_and_given_to_ray():
    text = """
    export A=1
    B=2
    RUNTIME='{"env_vars": {"C": "3", "A": "4"}}'
    D=5 ray job submit --runtime-env-json="$RUNTIME" -- E=6 python3 train.py --lr 1
    """
    read = read_script(None, text, environment={})
    assert {name: word.text for name, word in read.environment.items()} == {"A": "4", "C": "3", "D": "5", "E": "6"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python3 -m verl.trainer.main_ppo a.b=1", ["a.b=1"]),
        ("nohup python3 -u /opt/slime/train_async.py --lr 1 > log &", ["--lr", "1"]),
        ("docker run image bash -lc 'cd /x; python train.py --lr 1'", ["--lr", "1"]),
        ("./train.py --lr 1", ["--lr", "1"]),
        ("pkill -f train.py; echo python train.py; python train.py --lr 1", ["--lr", "1"]),
    ],
)
def test_trainers_are_known_however_they_are_started(text, words):
    assert [word.text for word in read_script(None, text, environment={}).words] == words


INT4 = "OPEN_TRAINING_INT4_GROUP_SIZE"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((f"python3 train.py {option} $X", "$X") for option in ("--decoder-last-pipeline-num-layers", "--tp")),
        *((f"python3 train.py {words}$X", "$X") for words in ("--megatron-config-path ", "--load=")),
        (f"export {INT4}=$SIZE\npython3 train.py --lr 1", INT4),
        ("ray job submit --runtime-env-json '{' -- python3 train.py --lr 1", "text JSON"),
    ],
)
def test_what_matters_and_is_not_known_is_never_passed_over(text, said):
    (line,) = read_script(None, text, environment={}).unresolved
    assert line == text_with(said)


def test_relative_paths_follow_the_scripts_directory(tmp_path):
    read = read_script(None, f"cd {tmp_path}\npython3 train.py --load run --ref-load=/a --lr x", environment={})
    assert [word.text for word in read.words] == ["--load", f"{tmp_path}/run", "--ref-load=/a", "--lr", "x"]
    read = read_script(None, "cd $NOWHERE\npython3 train.py --load run", environment={})
    assert "relative" in read.unresolved[0]
