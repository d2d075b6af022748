"""The HTML report in a real headless Chromium: without network, by link and keyboard, filtered, dark and light."""

import pytest
from support import browser

from ckptkit.verify.core.report import CheckResult, Finding, Report
from ckptkit.verify.reports import write_report

pytestmark = pytest.mark.skipif(browser.found() is None, reason=f"none of {', '.join(browser.NAMES)} is on PATH")

EVIL = "model.layers.3.<img src=x onerror=alert(1)>.weight"
REPORT = Report(
    version="0.1.0",
    command=("ckptkit", "verify", "a"),
    checkpoint="a</title><script>document.title='owned'</script>",
    source="b",
    checks=(
        CheckResult("CK202", "values", "failed", None, 10, 480, 1.5),
        CheckResult("CK501", "engine", "skipped", "sglang is not installed"),
    ),
    findings=(
        Finding("CK202", "the bits", "others", "convert again", "model.layers.{2..4}.self_attn.q_proj.weight", 3),
        Finding("CK202", "the bits", "some others", "convert again", EVIL),
        Finding("CK107", "one dtype", "two", "look", severity="warning"),
    ),
    facts={"stages": ["<b>0</b>"]},
    heat={"3": {"q_proj": {"tensors": 1, "max_error": 0.5, "max_steps": None, "failed": 1, "findings": ["CK202-1"]}}},
)
# WCAG 2's contrast of the text of an element with what is behind it.
CONTRAST = """(element) => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (color) => numbers(color).slice(0, 3).map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  let behind = element;
  const seen = (one) => numbers(getComputedStyle(one).backgroundColor)[3] ?? 1;
  while (behind.parentElement && seen(behind) === 0) behind = behind.parentElement;
  const [a, b] = [light(getComputedStyle(element).color), light(getComputedStyle(behind).backgroundColor)];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(REPORT, path)
    return path


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser.page(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def test_it_renders_without_a_network_and_runs_nothing_of_what_it_reports(tab, path):
    tab.open(path)
    assert tab.problems == []
    assert tab.run("document.querySelector('.verdict').textContent").startswith(
        "FAILED with 2 errors and 1 warning a</title><script>"
    )
    assert tab.run("document.querySelector('h1').textContent") == (
        "q_proj of layers 2 to 4: others, expected the bits, and 1 more error."
    )
    assert tab.run("document.title").startswith("failed: a</title>")
    assert tab.run("document.images.length") == 0
    assert tab.run("document.querySelector('.map svg').clientWidth") > 100
    assert tab.run("document.scripts.length") == 1
    assert tab.run("performance.getEntriesByType('resource').length") == 0
    assert EVIL in tab.run("document.body.textContent")


def test_a_link_opens_its_finding(tab, path):
    tab.open(path, "#CK202-2")
    opened = "[...document.querySelectorAll('details[open] dl')].map((e) => e.id).join()"
    assert tab.run(opened) == "CK202-2"
    assert tab.run("document.activeElement.id") == "CK202-2"
    tab.open(path)
    assert tab.run(opened) == ""
    tab.run("document.querySelector('.map td.sum a').click()")
    assert tab.run("new Promise((done) => setTimeout(done, 100))") is None
    assert tab.run(opened) == "CK202-1"


def test_the_keyboard_reaches_a_finding_and_opens_it(tab, path):
    tab.open(path)
    reached = []
    for _ in range(40):
        tab.press("Tab", 9)
        reached.append(tab.run("document.activeElement.textContent"))
        if reached[-1] == "details of CK202-1":
            break
    assert reached[-1] == "details of CK202-1"
    assert tab.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
    tab.press("Enter", 13)
    assert tab.run("document.activeElement.parentElement.open")


def test_the_filter_filters_and_a_link_to_what_it_hides_takes_it_away(tab, path):
    tab.open(path)
    rows = "[...document.querySelectorAll('article.finding')].filter((e) => e.offsetHeight)"
    visible = f"{rows}.map((e) => e.dataset.code + e.dataset.severity).join()"
    assert tab.run(visible) == "CK202error,CK202error,CK107warning"

    def choose(name, value):
        tab.run(
            f"(() => {{ const f = document.forms.filter; f['{name}'].value = '{value}'; "
            "f.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )

    choose("text", "Q_PROJ")
    assert tab.run(visible) == "CK202error"
    choose("text", "")
    choose("severity", "warning")
    assert tab.run(visible) == "CK107warning"
    assert tab.run("document.getElementById('shown').textContent") == "1 of 3 shown"
    tab.run("location.hash = '#CK202-1'")
    assert tab.run("new Promise((done) => setTimeout(done, 100))") is None
    assert tab.run(visible) == "CK202error,CK202error,CK107warning"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(tab, path, scheme):
    tab.scheme(scheme)
    tab.open(path, "#CK202-1")
    background = tab.run(
        "getComputedStyle(document.documentElement).colorScheme + getComputedStyle(document.body).backgroundColor"
    )
    chosen = "body, h1, h2, h3 *, b, dt, dd, td, th, a, summary, label, small, .status, .stages *, .sum *, .quiet"
    worst = tab.run(
        f"[...document.querySelectorAll('{chosen}')].map((e) => [({CONTRAST})(e), e.outerHTML.slice(0, 80)])"
        ".sort((a, b) => a[0] - b[0])[0]"
    )
    assert worst[0] >= 4.5, (background, worst)


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen(tab, path, width):
    tab.width(width)
    tab.open(path, "#CK202-1")
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.run("document.querySelector('.map td').getBoundingClientRect().width") > 300
