"""`triage`: a snippet of each symptom as its program prints it, sound runs, and logs of any size and content."""

import gzip
import json
import os
import re
import time
import tracemalloc
from io import BytesIO
from pathlib import Path

import pytest
from support.processes import ckptkit as ckptkit_command
from support.processes import python

import ckptkit
from ckptkit import CkptkitError
from ckptkit.app.cli.verb import VERBS
from ckptkit.verify.core.check import all_checks
from ckptkit.verify.triage.scan import Found
from ckptkit.verify.triage.symptom import PHASES, TABLE
from ckptkit.verify.triage.triage import triage

# Lines of logs in the form in which the programs print them; paths, names and numbers are ours. Source: the messages of
# Megatron-LM `training/checkpointing.py` and `core/dist_checkpointing`, slime and miles `backends/megatron_utils`,
# SGLang 0.5.16, vLLM, torch, transformers 4 and 5, Ray, NCCL.
LOGS = Path(__file__).parent / "logs"


def parts(file):
    return [(one.partition("\n")[0], one.partition("\n")[2]) for one in (LOGS / file).read_text().split("## ")[1:]]


# By the key of the symptom; the last line is the one that shows it.
SNIPPETS = {key: lines.rstrip("\n") for key, lines in parts("symptoms.txt")}
CLEAN = {path.stem.removeprefix("sound-"): path.read_text() for path in sorted(LOGS.glob("sound-*.txt"))}
PREFIX = "\x1b[36m(MegatronTrainRayActor pid=4711, ip=10.0.0.7)\x1b[0m "


def of(tmp_path, text):
    log = tmp_path / "train.log"
    log.write_text(text)
    return triage([log])


def keys(found):
    return [sign.symptom.key for sign in (*found.causes, *found.effects)]


def test_snippet_shows_its_symptom_and_no_other(tmp_path):
    for key, lines in SNIPPETS.items():
        snippet = "\n".join(PREFIX + line for line in lines.split("\n"))
        found = of(tmp_path, f"{CLEAN['slime']}{snippet}\n")
        assert keys(found) == [key]
        (sign,) = (*found.causes, *found.effects)
        assert sign.places[0].line == CLEAN["slime"].count("\n") + snippet.count("\n") + 1
        assert "\x1b" not in sign.places[0].text


def test_other_forms_of_a_message_are_known_too(tmp_path):
    found = [(key, line, keys(of(tmp_path, line.rstrip("\n")))) for key, line in parts("other-forms.txt")]
    assert len(found) > 25
    assert [one for one in found if one[2] != [one[0]]] == []


def test_log_and_lines_of_a_sound_run_show_nothing(tmp_path):
    for text in (*CLEAN.values(), *(LOGS / "no-symptom.txt").read_text().splitlines()):
        assert keys(of(tmp_path, text)) == [], text
    assert [place.text for place in of(tmp_path, CLEAN["slime"]).loaded] == [
        "successfully loaded checkpoint from /ckpt/qwen3 [ t 1/2, p 1/1 ] at iteration 0"
    ]


def test_every_symptom_has_a_snippet_and_a_key_of_its_own():
    assert sorted(symptom.key for symptom in TABLE) == sorted(SNIPPETS)


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        ("(EngineCore pid=7) WARNING 09-01 10:00:00 [q.py:418] Parameter a.b.weight not found in params_dict", "vLLM"),
        ("WARNING 09-01 10:00:00 [q.py:418] Parameter a.b.weight_packed not found in params_dict, skip", "vLLM"),
        ("[2026-09-01 10:00:00 TP0] Parameter a.b.weight_packed not found in params_dict", "SGLang"),
        ("[2026-09-01 10:00:00 TP3] Parameter a.weight not found in params_dict, skip loading", "SGLang"),
    ],
)
def test_line_is_of_the_engine_that_printed_it(line, engine, tmp_path):
    (sign,) = of(tmp_path, line).causes
    assert sign.symptom.title.startswith(engine)
    assert ("--against-sglang" in sign.symptom.command) <= (engine == "SGLang")


def test_memory_that_ran_out_long_after_loading_is_not_about_loading(tmp_path):
    loading, memory = SNIPPETS["cuda-oom-loading"].rsplit("\n", 1)
    assert keys(of(tmp_path, f"{loading}\n{'another line' + chr(10)}{memory}")) == ["cuda-oom-loading"]
    assert keys(of(tmp_path, loading + "\nanother line" * 100 + "\n" + memory)) == ["cuda-oom"]


def test_effects_come_after_causes_and_lines_are_counted(tmp_path):
    log = "\n".join([SNIPPETS["ray-actor-died"], *[SNIPPETS["name-dropped"]] * 5])
    found = of(tmp_path, log)
    assert ([sign.symptom.key for sign in found.causes], [sign.symptom.key for sign in found.effects]) == (
        ["name-dropped"],
        ["ray-actor-died"],
    )
    assert (found.causes[0].count, [place.line for place in found.causes[0].places]) == (5, [2, 3, 4])


def test_message_anywhere_in_a_line_of_any_length_is_found_once():
    message = SNIPPETS["name-dropped"].encode()
    for before in (0, 65_000, 65_500, 65_536, 131_000, 400_000):
        found = Found()
        found.scan(BytesIO(b"x" * before + message + b"y" * 70_000 + b"\nlast"), "log")
        assert [(symptom.key, count) for symptom, count in found.counts.items()] == [("name-dropped", 1)]
        assert found.lines == 2


def test_number_at_the_end_of_a_piece_is_not_read_before_it_is_whole():
    head = b"step 0: {'train/ppo_kl': "
    found = Found()
    found.scan(BytesIO(b"x" * (65_536 - len(head) - 2) + b" " + head + b"1.9e-07, 'train/grad_norm': 0.1}"), "log")
    assert found.counts == {}


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_log():
    class Endless(BytesIO):
        left = 40_000

        def readline(self, size=-1, /):
            self.left -= 1
            return SNIPPETS["name-dropped"].encode() + b" " * 900 + b"\n" if self.left > 0 else b""

    found = Found()
    found.scan(Endless(), "warm")
    tracemalloc.start()
    found.scan(Endless(), "log")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.lines == 2 * 39_999
    assert most < 1_000_000


HOSTILE = ["a" * 60_000, "/" * 60_000, "1" * 60_000, "Some weights of " * 4_000, "step 0: {" * 7_000, "\x1b[" * 30_000]
HOSTILE += ["step 0: {" + "a/" * 30_000, "value from checkpoint (" * 2_500, "size mismatch for " * 3_000]


def test_hostile_line_takes_no_longer_than_it_is_long():
    for text in HOSTILE:
        began = time.process_time()
        Found().scan(BytesIO(text.encode() + b" is not equal newly initialized is not divisible by\n"), "log")
        assert time.process_time() - began < 2, text[:20]


def test_no_pattern_repeats_without_bound():
    for symptom in TABLE:
        plain = re.sub(r"\\.|\[[^\]]*\]", "", symptom.pattern or "")
        assert not set("*+") & set(plain), symptom.key
        assert all(int(most) <= 1200 for most in re.findall(r"\{\d+,(\d+)\}", plain)), symptom.key


def test_commands_and_codes_exist():
    codes = {check.code for check in all_checks()}
    errors = (one for phase in PHASES for one in (phase.error("f"), phase.error("f").for_vllm()))
    for symptom in (*TABLE, *errors):
        assert set(symptom.codes) <= codes, symptom.key
        if not symptom.command.startswith("none: "):
            assert symptom.command.split()[0] == "ckptkit"
            assert symptom.command.split()[1] in VERBS, symptom.key
    assert {one.key for one in PHASES}.isdisjoint(one.key for one in TABLE)


@pytest.mark.parametrize("content", ["absent", "directory", "empty", "gzip", "binary"])
def test_log_that_cannot_be_read_is_an_error(content, tmp_path):
    log = tmp_path / "train.log"
    if content == "directory":
        log.mkdir()
    elif content != "absent":
        log.write_bytes({"empty": b"", "gzip": gzip.compress(b"text"), "binary": b"\0\1\2"}[content])
    with pytest.raises(CkptkitError) as raised:
        ckptkit.triage([log])
    assert "train.log" in raised.value.message
    assert raised.value.hint


def test_log_may_be_a_pipe_that_the_shell_opened():
    """As `<(kubectl logs ...)` is one. A named pipe, for which nobody may ever write, is refused."""
    reader, writer = os.pipe()
    os.write(writer, f"first line\n{SNIPPETS['name-dropped']}\n".encode())
    os.close(writer)
    try:
        found = triage([f"/dev/fd/{reader}"])
    finally:
        os.close(reader)
    assert (keys(found), found.lines) == (["name-dropped"], 2)


def test_command_reads_standard_input_escapes_and_exits_by_what_it_finds(tmp_path):
    clean = tmp_path / "clean.log"
    clean.write_text(CLEAN["slime"])
    done = ckptkit_command("triage", clean)
    assert (done.returncode, done.stdout.splitlines()[-1].partition(";")[0]) == (
        0,
        f"no known symptom in {clean} (13 lines)",
    )
    log = SNIPPETS["name-dropped"] + " \x1b]0;title\x07\x1b[2J\u202e\x07\n"
    done = python("-m", "ckptkit", "triage", clean, "-", given=log)
    assert done.returncode == 1
    assert "standard input:1: " in done.stdout
    assert "CK503" in done.stdout
    assert not set("\x1b\x07\u202e") & set(done.stdout)
    done = python("-m", "ckptkit", "triage", "-", "--json", given=log)
    report = json.loads(done.stdout)
    assert (done.returncode, report["schema"], report["lines"]) == (1, "ckptkit-triage/1", 1)
    assert [symptom["key"] for symptom in report["symptoms"]] == ["name-dropped"]
    done = ckptkit_command("triage", tmp_path / "absent.log")
    assert (done.returncode, done.stdout) == (2, "")


def test_triage_imports_nothing_heavy(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("text\n")
    code = "import sys, ckptkit; ckptkit.triage(sys.argv[1:]); print(sorted(sys.modules))"
    loaded = python("-c", code, log).stdout
    assert "ckptkit.verify.triage.scan" in loaded
    assert not {
        name
        for name in ("torch", "transformers", *(f"ckptkit.{one}" for one in ("converters", "quant", "verify.run")))
        if f"'{name}'" in loaded
    }


FRAMES = {"vLLM": "vllm/model_executor/models/qwen3.py", "SGLang": "sglang/srt/models/qwen3.py"}
MESSAGES = [
    "KeyError: 'embed_tokens.weight'",
    "KeyError: 'model.layers.0.mlp.experts.w2_weight'",
    "ValueError: There is no module or parameter named 'a.b' in Qwen3ForCausalLM",
]
UPDATES = [
    *("update_weights_from_ipc", "update_weights_from_tensor", "update_weights_from_distributed", "update_weights"),
    *("_update_weights", "update_parameter_in_bucket", "broadcast_parameter", "update_weights_via_ipc_zmq"),
    *("reload_weights", "update_weight_from_tensor"),
]


def traceback(engine, function, message):
    return (
        f'  File "trainer/rollout.py", line 256, in {function}\n'
        f'  File "/site/{FRAMES[engine]}", line 771, in load_weights\n{message}\n'
    )


@pytest.mark.parametrize("engine", FRAMES)
def test_a_tensor_of_an_update_is_no_fault_of_the_checkpoint_and_one_of_the_start_is(engine, tmp_path):
    for number, function in enumerate(UPDATES):
        (sign,) = of(tmp_path, traceback(engine, function, MESSAGES[number % 3])).causes
        assert sign.symptom.title.endswith("in a weight update")
        assert function.strip("_") in sign.symptom.meaning
        assert sign.symptom.command == f"ckptkit verify HF{' --against-vllm' * (engine == 'vLLM')} --update --tp N"
        assert "CK512" in sign.symptom.codes
    for number, function in enumerate(("load_model", "_initialize_model", "get_model", "update_states", "main")):
        (sign,) = of(tmp_path, traceback(engine, function, MESSAGES[number % 2])).causes
        assert "update" not in sign.symptom.title
        assert sign.symptom.command == f"ckptkit verify HF --against-{engine.lower()} --tp N"


def test_an_update_long_ago_or_before_a_new_start_is_another_matter(tmp_path):
    update, start = (traceback("SGLang", name, "") for name in ("update_weights_from_disk", "load_model"))
    for between in ("another line\n" * 150, start):
        (sign,) = of(tmp_path, f"{update}{between}{MESSAGES[0]}\n").causes
        assert sign.symptom.command == "ckptkit verify HF --against-sglang --tp N"


@pytest.mark.parametrize(
    ("lines_of_start", "command"),
    [
        (["ServerArgs(model_path='/c/hf', tp_size=4, x=1)"], "ckptkit verify /c/hf --against-sglang --tp 4"),
        (["ServerArgs(model_path='/c/hf;x')"], "ckptkit verify '/c/hf;x' --against-sglang --tp N"),
        (
            ["Initializing a V1 LLM engine (v0.26) with config: model='/c/v', seed=0, tensor_parallel_size=2, x"],
            "ckptkit verify /c/v --against-vllm --tp 2",
        ),
        (["model_path='/a'", "model_path='/b'"], "ckptkit verify HF --against-sglang --tp N"),
    ],
)
def test_the_command_names_what_the_log_says_is_served(lines_of_start, command, tmp_path):
    engine = "vLLM" if "vllm" in command else "SGLang"
    log = "\n".join([*lines_of_start, traceback(engine, "load_model", MESSAGES[0])])
    (sign,) = of(tmp_path, log).causes
    assert sign.symptom.command == command


@pytest.mark.parametrize(
    "text",
    [
        # Frames of no phase.
        'Traceback (most recent call last):\n  File "/opt/job/reward.py", line 7, in score\nValueError: no answer\n',
        # A last line that is not one, and frames without a last line.
        "RuntimeError: no frames are above it\n",
        'Traceback (most recent call last):\n  File "/s/sglang/srt/model_loader/loader.py", line 9, in load_model\n',
        # Another traceback came in between.
        'Traceback (most recent call last):\n  File "/s/x.py", line 9, in load_weights\n    f()\n'
        'Traceback (most recent call last):\n  File "/s/y.py", line 9, in score\nValueError: no answer\n',
        # A warning that names a file of such a phase.
        "/s/megatron/core/dist_checkpointing/x.py:9: UserWarning: slow\nValueError: no answer\n",
    ],
)
def test_an_error_outside_the_phases_is_none(text, tmp_path):
    assert keys(of(tmp_path, text)) == []


# Tracebacks as the programs print them, with a last line that nothing is known of, below the key and command of each.
PHASE_LOGS = parts("phases.txt")


def test_an_error_that_is_not_known_is_named_by_the_phase_of_its_frames(tmp_path):
    assert {heading.partition(": ")[0] for heading, _ in PHASE_LOGS} == {one.key for one in PHASES}
    for heading, text in PHASE_LOGS:
        found = of(tmp_path, f"{CLEAN['slime']}{text}")
        assert [f"{key}: {found.causes[0].symptom.command}" for key in keys(found)] == [heading]
        assert found.causes[0].places[0].line == (CLEAN["slime"] + text).count("\n"), "the last line, not the frames"
        assert ("vllm" in text) <= ("CK50" not in " ".join(found.causes[0].symptom.codes))


def test_an_error_after_a_known_cause_is_its_effect(tmp_path):
    again = "\nDuring handling of the above exception, another exception occurred:\n\n"
    (sign,) = of(tmp_path, traceback("SGLang", "load_model", MESSAGES[0]) + again + PHASE_LOGS[0][1]).causes
    assert sign.symptom.key == "weight-key"


def test_users_of_vllm_are_not_sent_to_sglang(tmp_path):
    """Neither by what a trainer prints, which names no engine in its line."""
    start = "INFO 09-01 10:00:00 [llm.py:9] Initializing a V1 LLM engine (v0.26) for vLLM\n"
    metrics = "step 2: {'train/train_rollout_logprob_abs_diff': 0.4}\n"
    (sign,) = of(tmp_path, metrics + start).causes
    assert (sign.symptom.command, sign.symptom.codes[:2]) == (
        "ckptkit verify HF --source CKPT --against-vllm",
        ("CK523", "CK524"),
    )
    both = of(tmp_path, f"{metrics}{start}{traceback('SGLang', 'f', '')}").causes[0]
    assert both.symptom.command == "ckptkit verify HF --source CKPT --against-sglang"
    for symptom in TABLE:
        assert "sglang" not in symptom.for_vllm().command, symptom.key
