"""CK602: recorded rollouts against the checkpoint; transformers' forward in the test is the independent truth."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support import models
from support.messages import text_with
from support.rollout_files import BYTES, COUNT, PROMPT, RESPONSE, Sample, ids_of, log_probs_of, samples, write

from ckptkit.app.api import convert, quantize
from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.checks.witnesses.behaviour import gap
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses.rollouts import run as rollout_run
from ckptkit.verify.witnesses.rollouts.recorded import read_recording
from ckptkit.verify.witnesses.rollouts.run import parts_of


@pytest.fixture
def judge(alone, in_process, tmp_path, recorded):
    def one(given, **how):
        file = how.pop("rollout_data", None) or write(tmp_path / "rollout.pt", given)
        how = {"rollout_temperature": 1.0, **how}
        result, findings = alone("CK602", how.pop("path", recorded.path), rollout_data=file, **how)
        return result.status, result.reason or "", findings

    return one


def test_gap_and_estimates_of_the_divergence_are_as_worked_out_by_hand():
    found = gap([[-1.0, -9.0], [-2.0]], [[-1.5, 0.0], [-1.0]], [[True, False], [True]])
    assert (found.tokens, found.mean, found.largest) == (2, 0.75, 1.0)
    assert found.k3 == pytest.approx(((math.exp(-0.5) - 1 + 0.5) + (math.exp(1) - 1 - 1)) / 2)


def test_command_line_passes_a_sound_rollout(recorded, tmp_path):
    given = samples(recorded.tokens, log_probs_of(recorded.path, recorded.tokens, 0.7))
    options = ["--rollout-data", str(write(tmp_path / "rollout.pt", given)), "--rollout-temperature", "0.7"]
    run = CliRunner().invoke(cli, ["verify", str(recorded.path), "--json", *options])
    report = json.loads(run.stdout)
    assert (run.exit_code, report["status"], report["findings"]) == (0, "passed", [])
    checks = {one["code"]: one["tensors_compared"] for one in report["checks"]}
    assert (checks["CK602"], checks["CK603"]) == (COUNT * RESPONSE, COUNT)
    assert report["facts"]["rollout"] == [text_with("4 7 versions 3")]
    assert report["facts"]["log-probabilities of the rollout"][0] == text_with("float32 96 4 mean")


def scaled(path, target, layer, factor):
    shutil.copytree(path, target)
    name = f"model.layers.{layer}.mlp.down_proj.weight"
    models.edit(target, name, models.tensors(path)[name] * factor)
    return target


def test_rollout_of_another_checkpoint_fails(judge, recorded, tmp_path):
    status, _, (finding,) = judge(recorded.samples(), path=scaled(recorded.path, tmp_path / "other", 11, -1.0))
    assert (status, finding.code, finding.severity) == ("failed", "CK602", "error")
    assert "version 3" in finding.hint


@pytest.mark.parametrize("shift", [-1, 1])
def test_log_probabilities_shifted_by_one_token_fail(judge, recorded, shift):
    given = recorded.samples()
    for one, every in zip(given, recorded.log_probs, strict=True):
        every = [-3.0, *every, -3.0]  # of the tokens next to the response's ends
        begin = PROMPT + shift
        one.rollout_log_probs = every[begin : begin + RESPONSE]
    status, _, (finding,) = judge(given)
    assert (status, finding.severity) == ("failed", "error")


def test_the_temperature_is_given_or_in_the_file(judge, recorded):
    cooler = log_probs_of(recorded.path, recorded.tokens, 0.7)
    given = samples(recorded.tokens, cooler)
    status, reason, findings = judge(given, rollout_temperature=None)
    assert (status, findings) == ("skipped", [])
    assert "--rollout-temperature" in reason
    assert judge(given, rollout_temperature=0.7) == ("passed", "", [])
    assert judge(given, rollout_temperature=1.0)[0] == "failed"
    for metadata in ({"temperature": 0.7}, {"sampling_params": {"temperature": 0.7, "top_p": 1.0}}):
        given = samples(recorded.tokens, cooler, metadata=metadata)
        assert judge(given, rollout_temperature=None) == ("passed", "", [])
        assert judge(recorded.samples(metadata=metadata), rollout_temperature=None)[0] == "failed"


def test_what_no_model_can_have_computed_fails(judge, recorded):
    given = recorded.samples()
    given[2].rollout_log_probs[5:8] = [math.nan, -math.inf, 0.5]
    _, _, (finding,) = judge(given)
    assert finding.actual == text_with("3 sample 2")
    given = recorded.samples()
    given[1].tokens[3] = 352
    _, _, (finding,) = judge(given)
    assert (finding.actual, finding.expected) == (text_with("352 1"), text_with("vocab_size 352"))


def far_off(given, **fields):
    for one in given:
        one.rollout_log_probs = [-2.0 - place % 5 for place in range(RESPONSE)]
        for name, value in fields.items():
            setattr(one, name, value)
    return given


@pytest.mark.parametrize(
    ("fields", "count", "words"),
    [
        ({"weight_versions": ["3", "4"]}, COUNT, "versions 3 4"),
        ({"rollout_top_p_token_ids": torch.tensor([1, 2])}, COUNT, "sampled with top-p"),
        ({"rollout_log_probs": None}, COUNT, "has no log-probabilities"),
        ({}, 1, "24 tokens"),
    ],
)
def test_a_gap_that_the_weights_need_not_explain_is_inconclusive(judge, recorded, fields, count, words):
    status, reason, findings = judge(far_off(recorded.samples()[:count], **fields))
    assert (status, findings) == ("skipped", [])
    assert reason == text_with(words)


def test_versions_tools_and_images_of_sound_samples_pass(judge, recorded):
    """Tokens of tools do not count, and samples with images are left out."""
    given = recorded.samples()
    given[0].weight_versions = ["3", "4"]
    for one in given:
        one.loss_mask = [1] * 10 + [0] * 4 + [1] * 10
        one.rollout_log_probs[10:14] = [0.0] * 4
    given[1].multimodal_inputs = {"images": ["data:"], "videos": None}
    given[1].rollout_log_probs = [-9.0] * RESPONSE
    assert judge(given) == ("passed", "", [])
    for one in given:
        one.multimodal_inputs = {"images": ["data:"]}
    assert judge(given)[0] == "skipped"


@pytest.mark.parametrize(
    ("method", "words"), [("compressed-tensors", "directory is quantized"), ("fp8", "rounds activations")]
)
def test_a_format_whose_noise_is_not_that_of_the_weights_is_inconclusive(
    judge, recorded, tmp_path, edit_json, method, words
):
    """Megatron's weights beside a quantized config, and a config of FP8."""
    path = home = tmp_path / "checkpoint"
    if method == "fp8":
        shutil.copytree(recorded.path, path)
    else:
        convert(recorded.path, path)
        home = path / "hf"
    edit_json(home / "config.json", quantization_config={"quant_method": method})
    status, reason, findings = judge(far_off(recorded.samples()), path=path)
    assert (status, findings) == ("skipped", [])
    assert words in reason


def test_one_sample_of_other_weights_is_named(judge, recorded):
    given = recorded.samples()
    given[3].loss_mask = [1] * 8 + [0] * 16
    given[3].rollout_log_probs = [value - 0.25 for value in given[3].rollout_log_probs]
    status, _, (finding,) = judge(given)
    assert (status, finding.count) == ("failed", 1)
    assert (finding.expected, finding.actual) == (text_with("sample 3 10"), text_with("mean"))
    given[0].weight_versions = ["2"]
    status, reason, findings = judge(given)
    assert (status, findings) == ("skipped", [])
    assert reason == text_with("sample 3")


def test_checkpoint_that_computes_no_numbers_fails(judge, recorded, tmp_path):
    _, _, (finding,) = judge(recorded.samples(), path=scaled(recorded.path, tmp_path / "broken", 3, math.nan))
    assert finding.actual == text_with("nan")


def test_gap_that_the_guides_call_jitter_is_a_warning(judge, recorded, tmp_path):
    models.save("qwen2-untied", tmp_path / "flat")  # logits so small that bfloat16 hardly rounds them
    log_probs = [[value - 0.012 for value in one] for one in log_probs_of(tmp_path / "flat", recorded.tokens)]
    status, _, (finding,) = judge(samples(recorded.tokens, log_probs), path=tmp_path / "flat")
    assert (status, finding.severity) == ("passed", "warning")
    assert finding.hint == text_with("KL 0.0001")


def test_int4_checkpoint_is_told_from_the_release_that_it_was_made_of(judge, recorded, tmp_path):
    int4 = tmp_path / "int4"
    quantize(recorded.path, int4, QuantScheme(32, "qmax7", (r"re:.*\.self_attn\..*", "lm_head")))
    # Here transformers unpacks the weights by itself, with compressed-tensors.
    given = samples(recorded.tokens, log_probs_of(int4, recorded.tokens))
    assert judge(given, path=int4) == ("passed", "", [])
    assert judge(recorded.samples(), path=int4)[0] == "failed"


def test_megatron_checkpoint_is_judged_through_its_hf_view(judge, recorded, tmp_path):
    convert(recorded.path, tmp_path / "megatron")
    assert judge(recorded.samples(), path=tmp_path / "megatron") == ("passed", "", [])


def trained(recorded, index, **fields):
    """A sample as slime's trainer saves it, its fields in the plural."""
    row = recorded.samples()[index]
    return {
        "data_parallel_rank": 0,
        "sample_index": index,
        "tokens": torch.tensor(row.tokens),
        "response_lengths": RESPONSE,
        "loss_masks": torch.ones(RESPONSE, dtype=torch.int),
        "rollout_log_probs": torch.tensor(row.rollout_log_probs),
        "log_probs": torch.tensor(row.rollout_log_probs),
        "advantages": torch.zeros(RESPONSE),
        **fields,
    }


def test_trainers_file_tells_which_side_is_wrong(judge, recorded, tmp_path):
    rows = [trained(recorded, index) for index in range(COUNT)]
    content = {"format_version": 2, "rollout_id": 7, "rank": 0, "samples": rows, "dp_shards": [{"rank": 0}]}
    torch.save(content, tmp_path / "train.pt")
    assert judge([], rollout_data=tmp_path / "train.pt") == ("passed", "", [])
    for row in rows:
        row["log_probs"] = row["log_probs"].roll(5)
    torch.save(content, tmp_path / "train.pt")
    _, _, (finding,) = judge([], rollout_data=tmp_path / "train.pt")
    assert finding.expected == text_with("trainer 3")


def test_a_spread_of_samples_is_computed_again_as_far_as_the_model_reads(monkeypatch, recorded, tmp_path):
    long = Sample(tokens=[5] * 300, response_length=270, rollout_log_probs=[-1.0] * 270)
    file = write(tmp_path / "long.pt", [long] * 40)
    options = VerifyOptions(rollout_data=file)
    parts = parts_of(Subject(recorded.path, options=options))
    # The model takes 256 tokens; 16 of 40 samples are 0, 2, 5, 7 ...
    assert [part.index for part in parts] == [at * 40 // 16 for at in range(16)]
    assert {(len(part.tokens), len(part.prompt_tokens), len(part.mask)) for part in parts} == {(256, 30, 226)}
    assert {len(part.log_probs["rollout_log_probs"]) for part in parts} == {226}
    monkeypatch.setattr(rollout_run, "_TOKENS", 1100)
    assert [part.index for part in parts_of(Subject(recorded.path, options=options))] == [0, 10, 20, 30]


def test_response_without_a_prompt_is_judged_from_its_second_token(recorded, tmp_path):
    alone = Sample(tokens=[5, 6, 7], response_length=3, rollout_log_probs=[-1.0, -2.0, -3.0])
    file = write(tmp_path / "alone.pt", [alone])
    (part,) = parts_of(Subject(recorded.path, options=VerifyOptions(rollout_data=file)))
    assert (len(part.prompt_tokens), part.mask) == (1, [True, True])
    assert part.log_probs == {"rollout_log_probs": [-2.0, -3.0]}


def test_columns_of_miles_trainer_are_read(recorded, tmp_path):
    rows = [trained(recorded, index) for index in range(COUNT)]
    columns = {key: [row[key] for row in rows] for key in rows[0]} | {"raw_reward": [1.0] * 9}
    content = {"rollout_id": 7, "rank": 0, "rollout_data": columns, "cp_rank": 0, "cp_size": 1}
    torch.save(content, tmp_path / "train.pt")
    found = read_recording(tmp_path / "train.pt")
    assert found.sides == ["rollout_log_probs", "log_probs"]
    assert [list(one.tokens) for one in found.samples] == recorded.tokens
    torch.save(content | {"cp_size": 2}, tmp_path / "train.pt")
    with pytest.raises(CkptkitError, match="2 context parallel ranks"):
        read_recording(tmp_path / "train.pt")


def test_a_rollout_file_that_is_none_ends_the_run_before_weights_are_read(recorded, tmp_path):
    torch.save({"samples": []}, tmp_path / "empty.pt")
    with pytest.raises(CkptkitError, match="has no samples"):
        verify(recorded.path, rollout_data=tmp_path / "empty.pt")
    with pytest.raises(CkptkitError, match="temperature"):
        verify(recorded.path, rollout_temperature=0.7)
    with pytest.raises(CkptkitError, match="temperature is 0"):
        verify(recorded.path, rollout_data=write(tmp_path / "a.pt", recorded.samples()), rollout_temperature=0)


# CK603: recorded prompts against the checkpoint's tokenizer and chat template, tokens worked out by hand.
ASKED = [{"role": "user", "content": "hello"}]
RENDERED = "<bos>hello<eos>A"


def prompted(prompt, tokens, **fields):
    ids = [*ids_of(tokens), 9, 10]
    return Sample(prompt=prompt, tokens=ids, response_length=2, rollout_log_probs=[-1.0, -1.0], **fields)


@pytest.fixture
def judge_prompts(alone, in_process, tmp_path, recorded):
    def one(*given, path=recorded.path):
        result, findings = alone("CK603", path, rollout_data=write(tmp_path / "rollout.pt", given))
        return result.status, result.reason or "", findings

    return one


def test_text_and_messages_with_their_tokens_pass(judge_prompts):
    tools = [{"type": "function", "function": {"name": "add"}}]
    found = judge_prompts(
        prompted("hello", "hello"),
        prompted(ASKED, RENDERED),
        prompted(ASKED, f"add{RENDERED}", metadata={"tools": tools}),
        prompted(ASKED, f"{RENDERED}T", apply_chat_template_kwargs={"enable_thinking": False}),
    )
    assert found == ("passed", "", [])


def test_options_that_no_file_records_are_tried_and_named(judge_prompts):
    answered = [*ASKED, {"role": "assistant", "content": "he"}]
    unfinished = prompted(ASKED, "<bos>hello<eos>")
    found = judge_prompts(prompted(ASKED, f"{RENDERED}T"), prompted(answered, "<bos>hello<eos><bos>he"), unfinished)
    assert found == ("passed", "", [])


@pytest.mark.parametrize(
    ("prompt", "tokens", "actual"),
    [
        (ASKED, "<bos>helpo<eos>A", f"'l' ({BYTES['l']}) 4 'p' ({BYTES['p']}) '<bos>hel' 1 2"),  # another template
        ("hello", "hell", f"'o' ({BYTES['o']}) 4 end 1 2"),
        ("hell", "hello", "end 4 'o' 1 2"),
        ("hello", "<bos>hello", f"'h' ({BYTES['h']}) 0 '<bos>' 1 2"),  # another tokenization
        ([{"role": "critic", "content": "no"}], RENDERED, "critics"),  # which the template refuses
    ],
)
def test_a_prompt_with_other_tokens_is_named_by_the_first(judge_prompts, prompt, tokens, actual):
    status, _, (finding,) = judge_prompts(prompted("hello", "hello"), prompted(prompt, tokens))
    assert (status, finding.severity, finding.actual) == ("failed", "error", text_with(actual))


def test_without_a_template_or_a_tokenizer_it_is_inconclusive(judge_prompts, recorded, tmp_path):
    path = Path(shutil.copytree(recorded.path, tmp_path / "bare"))
    (path / "chat_template.jinja").unlink()
    assert judge_prompts(prompted("hello", "hello"), path=path) == ("passed", "", [])
    status, reason, _ = judge_prompts(prompted(ASKED, RENDERED), path=path)
    assert (status, reason) == ("skipped", text_with("chat"))
    for name in ("tokenizer.json", "tokenizer.model"):
        (path / name).unlink()
    status, reason, _ = judge_prompts(prompted("hello", "hello"), path=path)
    assert (status, reason) == ("skipped", text_with("tokenizer"))


def test_a_file_without_prompts_is_not_judged(alone, recorded, tmp_path):
    file = write(tmp_path / "rollout.pt", [prompted("", "hello")])
    assert alone("CK603", recorded.path, rollout_data=file) == (None, [])
