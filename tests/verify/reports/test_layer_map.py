"""The map with layers across: what is drawn where, which experts are wrong, the strip, and a page that stays small."""

import re
from dataclasses import replace
from pathlib import Path

from ckptkit.core.specs import summarize
from ckptkit.verify.core.report import CheckResult, Finding, Report
from ckptkit.verify.reports import report_text, write_report
from ckptkit.verify.reports.heat import Measured, heat_map
from ckptkit.verify.reports.html import layer_map, stages

LAYERS, EXPERTS = 100, 200


def names():
    plain = [
        f"model.layers.{layer}.{tail}.weight"
        for layer in range(LAYERS)
        for tail in ("input_layernorm", "self_attn.q_proj", "self_attn.o_proj", "mlp.gate")
    ]
    experts = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in range(3, LAYERS)
        for expert in range(EXPERTS)
        for part in ("gate", "up", "down")
    ]
    return [*plain, *experts, "model.embed_tokens.weight", "lm_head.weight"]


def large():
    """A model in which layers 70 and 80 are exchanged, and a rank's experts of layer 42 are another's."""
    every = names()
    moved = frozenset(name for name in every if name.startswith(("model.layers.70.", "model.layers.80.")))
    local = frozenset(f"model.layers.42.mlp.experts.{expert}.up_proj.weight" for expert in range(96, 128))
    findings = [
        Finding("CK202", "own", "layers {70,80} are exchanged", "again", summarize(moved), len(moved), names=moved),
        Finding("CK202", "own", "other experts", "again", summarize(local), len(local), names=local),
    ]
    heat = heat_map(((name, Measured(0.0, failed=name in moved | local)) for name in every), findings)
    checks = (CheckResult("CK202", "values", "failed", None, len(every), 8, 132.4),)
    return Report("0", ("ckptkit",), "/a", "/b", checks, findings, {}, heat)


def test_a_large_model_is_a_small_page_that_shows_where():
    page = report_text(large(), ".html")
    assert len(page) < 60_000
    assert len(re.findall(r"<[a-z]", page)) < 600
    assert '<path class="failed" d="M70 0v200h1v-200zM80 0v200h1v-200z">' in page
    assert '<path class="failed" d="M42 96v32h1v-32z"><title>experts 96 to 127 of layer 42</title>' in page
    assert "✗ layers 42, 70 and 80" in page
    assert page.index("Layers 70 and 80 are exchanged, and 1 more error.") < page.index('<ol class="stages"')
    assert page.index('<ol class="stages"') < page.index("experts down") < page.index('<article class="finding')


def test_the_map_has_what_the_report_says_of_each_layer():
    cell = {"tensors": 1, "max_error": 0.0, "max_steps": None, "failed": 0, "findings": []}
    wrong = cell | {"max_error": 0.5, "failed": 1, "findings": ["CK202-1"]}
    heat = {str(layer): {"q_proj": wrong if layer == 3 else cell, "norms": cell} for layer in range(5)}
    heat |= {"mtp 0": {"norms": cell}, "outside layers": {"lm_head": wrong, "embed_tokens": cell}}
    found = layer_map(heat, {"CK202-1": "CK202-1"})
    assert [(row.kind, row.style, row.summary, row.link) for row in found.rows] == [
        ("q_proj", "failed", "✗ layer 3", "CK202-1"),
        ("norms", "equal", "equal", None),
    ]
    assert [(area.style, area.path) for area in found.rows[0].areas] == [
        ("equal", "M0 0h3v1h-3zM4 0h1v1h-1z"),
        ("failed", "M3 0h1v1h-1z"),
    ]
    assert found.rows[0].areas[1].described == "q_proj, layer 3: 1 tensors; 1 wrong; largest difference 0.5; CK202-1"
    assert [(row.kind, row.summary) for row in found.outside] == [("lm_head", "✗ wrong"), ("embed_tokens", "equal")]
    assert [label for _, label in found.ticks] == ["0", "1", "2", "3", "4", "mtp 0"]
    assert found.experts is None
    assert [style for style, _ in found.legend] == ["failed", "equal", "empty"]


def test_experts_around_a_wrong_one_are_called_equal_only_where_they_are():
    rounded = {"tensors": 4, "max_error": None, "max_steps": 0.5, "failed": 0, "findings": [], "experts": 4}
    wrong = rounded | {"failed": 1, "failed_experts": "2"}
    found = layer_map({str(layer): {"experts.up_proj": wrong if layer == 1 else rounded} for layer in range(3)}, {})
    assert [(area.style, area.path) for area in found.experts.areas] == [
        ("near", "M0 0v4h1v-4zM1 0v4h1v-4zM2 0v4h1v-4z"),
        ("failed", "M1 2v1h1v-1z"),
    ]
    assert [style for style, _ in found.legend] == ["failed", "near"]


def test_the_strip_says_what_was_asked_and_what_was_not():
    checks = (
        CheckResult("CK101", "config", "passed", None, 1),
        CheckResult("CK202", "values", "failed", None, 3, 8, 132.4),
        CheckResult("CK305", "steps", "failed", None, 3),
        CheckResult("CK401", "loads", "passed", None, 3),
        CheckResult("CK501", "loads", "skipped", "SGLang is not installed"),
    )
    findings = (
        Finding("CK202", "a", "b", "c", "x"),
        Finding("CK305", "a", "b", "c", "x", cause="CK202-1"),
        Finding("CK401", "a", "b", "c", "x", severity="warning"),
    )
    report = replace(
        large(), checks=checks, findings=findings, reasons=("CK501: SGLang is not installed",), not_asked=("vLLM",)
    )
    assert [(one.name, one.style, one.outcome, one.detail) for one in stages(report)] == [
        ("Source", "passed", "given", "b"),
        ("Files", "passed", "✓ passed", "1 check"),
        ("Values", "failed", "✗ 1 error", "1 check, 2 min 12 s"),
        ("Quantization", "failed", "✗ same cause", "1 check"),
        ("Megatron", "warning", "! 1 warning", "1 check"),
        ("SGLang", "skipped", "? not known", "1 check"),
        ("vLLM", "unasked", "not asked", "--against-vllm"),
    ]
    alone = replace(report, source=None, not_asked=("source", "vLLM"))
    assert next(one.outcome for one in stages(alone)) == "not given"


# Colours of the map: on a scale of their own, so a sound page is calm, and a fault makes no other cell pale.


EXAMPLES = Path(__file__).resolve().parents[3] / "docs/examples"
SOUND = {"tensors": 1, "max_error": None, "max_steps": None, "failed": 0, "findings": []}


def shades(folder, cells):
    """The classes of these cells, on a page with a kind of tensors for each."""
    heat = {"0": {f"k{number}": {**SOUND, **cell} for number, cell in enumerate(cells)}}
    write_report(Report("0", (), "a", "b", (), (), {}, heat), folder / "page.html")
    found = re.findall(r'<path class="([^"]*)" d="[^"]*"><title>k(\d+),', (folder / "page.html").read_text())
    return [style for style, _ in sorted(found, key=lambda pair: int(pair[1]))]


def test_each_shade_is_of_a_size_and_a_sound_page_is_calm(tmp_path):
    """Rounding takes a weight half a step away, what is equal is not off at all, and other cells do not matter."""
    shade = ["heat-1", "heat-2", "heat-3", "heat-4"]
    cells = [{"max_steps": steps} for steps in (0.5, 0.6, 1.5, 3.0, 5.0)]
    assert shades(tmp_path, cells) == ["near", *shade]
    assert shades(tmp_path, [*cells, {"max_steps": 1e6, "failed": 1}]) == ["near", *shade, "failed"]
    cells = [{"max_error": error} for error in (0.0, 1e-5, 1e-3, 0.1, 2.0)]
    assert shades(tmp_path, cells) == ["equal", *shade]
    assert shades(tmp_path, [{}, {"max_error": 2.0, "findings": ["CK210-1"]}]) == ["read", "warning"]
    page = (EXAMPLES / "passed.html").read_text()
    assert set(re.findall(r'<path class="([^"]*)" d="[^"]*"><title>', page)) == {"near", "equal"}
    for name in ("heat-1", "heat-4", "equal", "near", "read", "wrong", "warned"):  # in light and dark
        assert len(re.findall(rf"--{name}: #[0-9a-f]{{6}}", page)) == 2
