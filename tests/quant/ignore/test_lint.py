"""`ckptkit lint` on published lists: what each entry covers, what is found and why, and the list it proposes."""

import json

import pytest
from click.testing import CliRunner
from mutations.edits import edit_config
from support.messages import refusal, text_with
from support.published import (
    GLM,
    GLM_LIST,
    GLM_RULES,
    KIMI,
    KIMI_LIST,
    MINIMAX,
    MINIMAX_LIST,
    QWEN,
    QWEN_LIST,
    kimi_names,
    packed,
    quantization,
    write,
)

import ckptkit
from ckptkit.app.cli import cli
from ckptkit.quant.ignore.lint import lint
from ckptkit.quant.ignore.readers import SGLANG, VLLM

ROUTER = r"re:.*\.mlp\.gate(\.weight)?$"
DRAFT = r"re:model\.(layers\.4|decoder)\..*"
BY_NAME = ("compressed-tensors", "transformers", *VLLM, "SGLang 0.5.16", "SGLang 0.5.23", "slime")


def found(report):
    return [(one.severity, one.kind, one.tensors, one.readers) for one in report.findings]


@pytest.mark.parametrize("index", [True, False], ids=["index", "lone config"])
def test_kimi_k2_thinking(tmp_path, index):
    """Neither the router nor the embedding is named: engines know better by class, slime would pack both."""
    report = lint(write(tmp_path, KIMI, KIMI_LIST, kimi_names() if index else None))
    assert report.packed == 3 * 12 * 3
    assert found(report) == [
        ("warning", "exposed", ("model.embed_tokens.weight",), ("slime",)),
        ("warning", "exposed", ("model.layers.{1..3}.mlp.gate.weight",), ("slime",)),
    ]
    assert report.portable == (*KIMI_LIST, "model.embed_tokens", ROUTER)
    dense = tuple(f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    covered = report.patterns[KIMI_LIST[3]]
    assert {reader: sorted(tensors) for reader, tensors in covered.items()} == dict.fromkeys(BY_NAME, sorted(dense))
    assert (report.failed, report.warnings) == (False, 2)


def test_glm_without_the_router_rule(tmp_path):
    report = lint(write(tmp_path, GLM, GLM_LIST))
    draft = tuple(f"model.layers.4.mlp.experts.0.{name}_proj.weight" for name in ("down", "gate", "up"))
    assert found(report)[:4] == [
        ("error", "exposed", draft, ("SGLang 0.5.16", "SGLang 0.5.23", "slime")),
        ("error", "exposed", ("model.embed_tokens.weight",), ("slime",)),
        ("error", "exposed", ("model.layers.{1..3}.mlp.gate.weight",), ("slime",)),
        ("error", "exposed", ("model.layers.4.eh_proj.weight", "model.layers.4.mlp.gate.weight"), ("slime",)),
    ]
    assert found(report)[4] == ("warning", "exposed", draft, VLLM)
    assert {report.findings[index].hint for index in (0, 3, 4)} == {f"use the entry '{DRAFT}'"}
    note = report.findings[5]
    assert (note.severity, note.hint) == ("note", "start SGLang with --disable-shared-experts-fusion")
    assert report.portable == (*GLM_LIST, "model.embed_tokens", ROUTER, DRAFT)


def test_glm_with_the_router_rule_of_parameter_names(tmp_path):
    """It is slime's alone: no other reader finds a module named like that, and none would pack the router anyway."""
    report = lint(write(tmp_path, GLM, (*GLM_LIST, *GLM_RULES, DRAFT)))
    assert report.patterns[GLM_RULES[0]]["slime"] == ("model.layers.{1..4}.mlp.gate.weight",)
    assert all(report.patterns[GLM_RULES[0]][reader] == () for reader in BY_NAME[:-1])
    assert report.patterns[GLM_RULES[1]] == dict.fromkeys(BY_NAME, ()) | dict.fromkeys(
        ("compressed-tensors", "transformers", "slime"), ("model.layers.4.eh_proj.weight",)
    )
    assert [(one.severity, one.kind, one.pattern) for one in report.findings] == [("note", "shared expert", None)]
    assert report.portable == (*GLM_LIST, *GLM_RULES, DRAFT)


def test_qwen3(tmp_path):
    """slime matches names with `.weight`, so an entry ending in `gate$` keeps the router for all but slime."""
    report = lint(write(tmp_path, QWEN, QWEN_LIST))
    assert report.packed == 4 * (4 + 12 * 3)
    assert found(report) == [
        ("error", "exposed", ("model.embed_tokens.weight",), ("slime",)),
        ("error", "exposed", ("model.layers.{0..3}.mlp.gate.weight",), ("slime",)),
    ]
    assert [one.pattern for one in report.findings] == [None, "re:.*mlp.gate$"]
    assert report.patterns["re:.*mlp.gate$"]["compressed-tensors"] == ("model.layers.{0..3}.mlp.gate.weight",)
    assert report.patterns["re:.*mlp.gate$"]["slime"] == ()
    assert report.portable == ("lm_head", "model.embed_tokens", ROUTER)


def test_minimax(tmp_path):
    """Its experts are w1, w2, w3 in the release and gate_proj, up_proj, down_proj of expert 0 in engines."""
    report = lint(write(tmp_path, MINIMAX, MINIMAX_LIST))
    assert report.packed == 4 * 12 * 3
    assert found(report) == [("error", "exposed", ("model.layers.{0..3}.block_sparse_moe.gate.weight",), ("slime",))]
    assert report.portable == (
        "lm_head",
        "model.embed_tokens",
        "re:.*self_attn.*",
        r"re:.*\.block_sparse_moe\.gate(\.weight)?$",
    )


def test_minimax_by_targets(tmp_path):
    """By its own names only compressed-tensors finds w1, since engines ask for gate_proj; with the alias all do."""
    ignore = (*MINIMAX_LIST[:3], r"re:.*\.block_sparse_moe\.gate(\.weight)?$")
    targets = [r"re:.*\.w(1|2|3)$", r"re:.*(gate_up|gate|up|down)_proj$"]
    by_names = lint(write(tmp_path / "names", MINIMAX, ignore, targets=targets[:1]))
    assert by_names.packed == 144
    assert SGLANG in {one.readers[-2:] for one in by_names.findings if one.severity == "error"}
    assert lint(write(tmp_path / "alias", MINIMAX, ignore, targets=targets)).findings == ()


@pytest.mark.parametrize(
    ("entry", "reader", "swallowed"),
    [
        ("model.layers.1", "slime", "model.layers.{10..11}."),
        ("model.layers.1", "SGLang 0.5.16", "model.layers.{10..11}."),
        ("model.layers.0.mlp.experts.1", "slime", "model.layers.0.mlp.experts.{10..11}."),
        ("re:model.layers.1.*", "compressed-tensors", "model.layers.{10..11}."),
    ],
)
def test_a_number_that_begins_others(tmp_path, entry, reader, swallowed):
    report = lint(write(tmp_path, QWEN | {"num_hidden_layers": 12}, ["lm_head", "model.embed_tokens", ROUTER, entry]))
    finding = next(one for one in report.findings if one.kind == "over-match")
    assert finding.pattern == entry
    assert reader in finding.readers
    assert all(tensor.startswith(swallowed) for tensor in finding.tensors)


def test_a_gate_without_an_end(tmp_path):
    """In the dense layer it covers gate_proj and not up_proj, of which engines make one layer."""
    config = GLM | {"num_nextn_predict_layers": 0}
    report = lint(write(tmp_path, config, ["lm_head", "model.embed_tokens", "re:.*mlp.gate.*"]))
    over = next(one for one in report.findings if one.kind == "over-match")
    assert (over.pattern, over.tensors) == ("re:.*mlp.gate.*", ("model.layers.0.mlp.gate_proj.weight",))
    partly = next(one for one in report.findings if one.kind == "partly ignored")
    assert partly.tensors == ("model.layers.0.mlp.gate_proj.weight",)
    assert report.portable is None
    # An entry that names a whole block does not reach too far.
    assert lint(write(tmp_path / "whole", config, ["lm_head", "model.embed_tokens", "re:.*mlp.*"])).findings == ()


def test_an_entry_that_covers_nothing(tmp_path):
    report = lint(write(tmp_path, QWEN, ["lm_head", "model.embed_tokens", ROUTER, "re:.*no_such.*"]))
    assert [(one.kind, one.pattern) for one in report.findings] == [("unused", "re:.*no_such.*")]
    assert report.portable == ("lm_head", "model.embed_tokens", ROUTER)


def test_a_packed_router(tmp_path):
    names = [name for name in kimi_names() if name != "model.layers.2.mlp.gate.weight"]
    path = write(tmp_path, KIMI, KIMI_LIST, [*names, *packed("model.layers.2.mlp.gate")])
    forbidden = next(one for one in lint(path).findings if one.kind == "packed")
    assert (forbidden.severity, forbidden.tensors) == ("error", ("model.layers.2.mlp.gate.weight_packed",))
    refusal("agree", lint, path, fix=True)
    assert not (path / "config.json.orig").exists()


@pytest.mark.parametrize("left_out", ["model.layers.1.mlp.experts.5.", "model.layers.3.mlp.experts."])
def test_experts_that_are_not_packed(tmp_path, left_out):
    names = [name for name in kimi_names() if not name.startswith(left_out)]
    experts = ("5.",) if left_out.endswith("5.") else tuple(f"{expert}." for expert in range(12))
    root = left_out.removesuffix("5.")
    left = [f"{root}{expert}{name}_proj.weight" for expert in experts for name in ("gate", "up", "down")]
    report = lint(write(tmp_path, KIMI, KIMI_LIST, [*names, *left]))
    partly = [sorted(one.tensors) for one in report.findings if one.kind == "partly ignored"]
    whole = (*KIMI_LIST, "model.embed_tokens", ROUTER, r"re:(.*\.)?layers\.(3)\.mlp\.experts\..*")
    assert (partly, report.portable) == (([sorted(left)], None) if len(experts) == 1 else ([], whole))


def test_several_groups(tmp_path):
    report = lint(write(tmp_path, QWEN, ["lm_head", "model.embed_tokens", ROUTER], groups=2))
    assert found(report) == [("warning", "groups", (), ("slime",))]
    assert lint(tmp_path, readers=["sglang", "vllm"]).findings == ()


def test_fix(tmp_path):
    path = write(tmp_path, QWEN, QWEN_LIST)
    before = (path / "config.json").read_bytes()
    assert lint(path / "config.json", fix=True).fixed
    assert json.loads((path / "config.json").read_text())["quantization_config"]["ignore"] == [
        "lm_head",
        "model.embed_tokens",
        ROUTER,
    ]
    assert (path / "config.json.orig").read_bytes() == before
    assert sorted(entry.name for entry in path.iterdir()) == ["config.json", "config.json.orig"]
    again = lint(path, fix=True)
    assert (again.findings, again.fixed) == ((), False)


def test_fix_where_the_list_lies_in_text_config(tmp_path):
    text = {**KIMI, "model_type": "kimi_k2"}
    text["quantization_config"] = quantization(KIMI_LIST)
    config = {"model_type": "kimi_k25", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    lint(tmp_path, fix=True)
    fixed = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in fixed
    rest = ["language_model.model.embed_tokens", ROUTER, "language_model.lm_head"]
    assert fixed["text_config"]["quantization_config"]["ignore"] == [*KIMI_LIST, *rest]


AWQ = {"quantization_config": {"quant_method": "awq"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": None}, "no quantization_config"),
        (AWQ, "'awq'"),
        ({"quantization_config": {}}, "quantization_config is {}"),
        ({"quantization_config": None, "text_config": AWQ}, "'awq'"),
        ({"quantization_config": None, "llm_config": AWQ}, "llm_config.quantization_config"),
        ({"quantization_config": quantization([]) | {"config_groups": {}, "kv_cache_scheme": {"a": 1}}}, "declares"),
        ({"quantization_config": quantization(["re:("])}, "expression"),
        ({"quantization_config": quantization([]) | {"ignore": "lm_head"}}, "`ignore` is 'lm_head'"),
        ({"quantization_config": quantization([]) | {"config_groups": []}}, "compressed-tensors"),
        ({"model_type": "gpt_oss"}, "Linear layers"),
    ],
)
def test_what_cannot_be_looked_at(tmp_path, change, message):
    path = write(tmp_path, QWEN, QWEN_LIST)
    edit_config(path, **change)
    refusal(message, lint, path)


def test_a_directory_without_config_json_is_named_for_what_it_is(tmp_path):
    (tmp_path / "run/checkpoint-5").mkdir(parents=True)
    (tmp_path / "run/checkpoint-5/model.safetensors").write_bytes(b"x")
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron/.metadata").write_bytes(b"x")
    hints = {"absent": "path", "run": str(tmp_path / "run/checkpoint-5"), "megatron": "HF directory"}
    for name, hint in hints.items():
        assert refusal("", lint, tmp_path / name).hint == text_with(hint)


def run(*arguments):
    return CliRunner().invoke(cli, ["lint", *map(str, arguments)], env={"COLUMNS": "80"})


def test_the_command(tmp_path):
    write(tmp_path, QWEN, QWEN_LIST)
    shown = run(tmp_path)
    assert shown.exit_code == 1
    assert "model.layers.{0..3}.mlp.gate.weight (4 tensors)" in shown.output
    assert shown.output.splitlines()[-1] == f"FAILED with 2 errors  {tmp_path}"
    assert all(len(line) <= 80 and line == line.rstrip() for line in shown.output.splitlines()[:-1])
    content = json.loads(run(tmp_path, "--json").output)
    assert content["schema"] == "ckptkit-lint/1"
    assert content["portable"] == ["lm_head", "model.embed_tokens", ROUTER]
    assert content["findings"][0]["tensors"] == ["model.embed_tokens.weight"]
    assert run(tmp_path, "--reader", "sglang", "--reader", "vllm").exit_code == 0
    fixed = run(tmp_path, "--fix")
    assert (fixed.exit_code, "config.json.orig" in fixed.output) == (0, True)
    assert (tmp_path / "config.json.orig").exists()
    assert ckptkit.lint is lint


def test_the_verdicts_of_the_command(tmp_path):
    """A list that slime alone reads otherwise does not pass; an unused entry does, but for --strict."""
    path = write(tmp_path / "unused", QWEN, ["lm_head", "model.embed_tokens", ROUTER, "re:.*no_such.*"])
    plain, strict = run(path), run(path, "--strict")
    assert (plain.exit_code, plain.output.splitlines()[-1]) == (0, f"PASSED with 1 warning  {path}")
    assert (strict.exit_code, strict.stderr) == (1, "--strict: warnings: 1\n")
    path = write(tmp_path / "kimi", KIMI, KIMI_LIST, kimi_names())
    shown, engines = run(path), run(path, "--reader", "sglang", "--reader", "vllm")
    assert (shown.exit_code, shown.output.splitlines()[-1]) == (0, f"READERS DISAGREE with 2 warnings  {path}")
    assert (engines.exit_code, len(engines.output.splitlines())) == (0, 2)


@pytest.mark.parametrize("readers", [None, ["vllm"], ["transformers"], ["vllm", "transformers"]])
def test_a_verdict_without_a_portable_list_is_an_error(tmp_path, readers):
    """No list leaves q alone unpacked in vLLM; transformers takes it as it is."""
    config = QWEN | {"num_hidden_layers": 1}
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.gate.weight", "lm_head.weight"]
    names += ["model.layers.0.self_attn.q_proj.weight"]
    for module in ("self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"):
        names += packed(f"model.layers.0.{module}")
    ignore = ["lm_head", "model.embed_tokens", ROUTER, "model.layers.0.self_attn.q_proj"]
    path = write(tmp_path, config, ignore, names)
    report = lint(path, readers=readers)
    shown = run(path, *(word for reader in readers or [] for word in ("--reader", reader)))
    alone = readers == ["transformers"]
    assert (report.portable is None, report.failed, shown.exit_code) == (not alone, not alone, int(not alone))
    assert ("PASSED" in shown.output) is alone


def test_of_many_entries_that_cover_nothing_one_stands_for_all(tmp_path):
    ignore = ["lm_head", "model.embed_tokens", ROUTER, *(f"no_such.{number}" for number in range(500))]
    (finding,) = lint(write(tmp_path, QWEN, ignore)).findings
    assert (finding.kind, finding.pattern) == ("unused", "no_such.0")
    assert "499 more" in finding.message
