"""Every verb on inputs that are made to harm: a clean error, no code run, nothing outside touched, little used."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial

import pytest
from click import Context
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.nightly import daily
from support.processes import environment

from ckptkit.app.cli import LazyGroup, cli
from hostile import json_cases, kinds, links, texts, weights
from hostile.bases import COMMANDS, WITHOUT_CONTROL, commands, linked, make_bases
from hostile.case import RAN
from hostile.mutations import mutations

_MADE = (kinds.cases(kinds.FILES), json_cases.cases(), weights.cases(), texts.cases(), links.cases())
CASES = {one.name: one for several in (*_MADE, kinds.cases(kinds.CARRIED)) for one in several}
FIXED = ("config.json", "config.json.orig")
ALL_VERBS = "CKPTKIT_ALL_VERBS" in os.environ


@dataclass(frozen=True)
class Ran:
    """How a verb ended: exit code, all that it printed, and what it did that no verb may do."""

    code: int
    said: str
    seen: list[str]
    seconds: float
    fixed: bool = False


class Runner:
    def __init__(self, sound, scratch):
        self.sound, self._scratch = sound, scratch
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "hostile.server"],
            env=environment(OMP_NUM_THREADS="1", MALLOC_ARENA_MAX="1", HF_HUB_OFFLINE="1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        warming = [words for base in COMMANDS if base not in WITHOUT_CONTROL for words in self._warming(base)]
        self._send(warming)

    def _warming(self, base):
        for verb, words in commands(base, self.sound).items():
            if verb == "like":  # it starts threads of torch, which forks have no use of
                continue
            out = f"{self._scratch}/{base}-{verb}-"
            yield [
                word.replace("in/", f"{self.sound}/{base}/")
                if word.startswith("in/")
                else f"{self.sound}/{base}"
                if word == "in"
                else word.replace("out/", out)
                for word in words
            ]

    def _send(self, request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def run(self, words, root):
        self._send([words, str(root)])
        return Ran(**json.loads(self._process.stdout.readline()), fixed="--fix" in words)

    def end(self):
        self._process.communicate()


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    sound, scratch = root / "sound", root / "scratch"
    sound.mkdir()
    scratch.mkdir()
    make_bases(sound)
    running = Runner(sound, scratch)
    yield running
    running.end()


@pytest.fixture
def here(tmp_path):
    """The directory in which verbs run: they may write into `out` and `tmp`, and may not look into `outside`."""
    for name in ("out", "tmp", "outside"):
        (tmp_path / name).mkdir()
    yield tmp_path
    shutil.rmtree(tmp_path)


def tree(root):
    """Kind, size and time of last change of everything below a directory but `out`."""
    found = {}
    for folder, folders, files in os.walk(root):
        if folder == str(root):
            folders.remove("out")
        for name in [*folders, *files]:
            one = os.lstat(os.path.join(folder, name))
            size = 0 if name in folders else one.st_size
            found[os.path.join(folder, name)] = (one.st_mode, size, one.st_mtime_ns)
    del found[str(root / "tmp")]
    return found


def faults(ran, here, before):
    """What no verb may do on any input, as lines for people."""
    found = [f"exit code {ran.code}"] if ran.code not in (0, 1, 2) else []
    found += ran.seen
    found += [word for word in ("Traceback", "an error inside") if word in ran.said]
    found += ["an error without a next step"] if "error: " in ran.said and "next" not in ran.said else []
    found += ["control characters"] if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", ran.said) else []
    found += ["more than 20000 characters"] if len(ran.said) > 20_000 and ran.code else []
    found += ["the payload ran"] if (here / RAN).exists() else []
    after = tree(here)
    fixed = [str(here / "in" / name) for name in ("", *FIXED)] if ran.fixed and not ran.code else []
    changed = {path for path, _ in {*before.items()} ^ {*after.items()}}.difference(fixed)
    found += [f"changed: {path}" for path in sorted(changed)]
    if ran.code:
        left = {path.name for path in (here / "out").iterdir()}
        found += [f"left: {name}" for name in sorted(left)]
    return found


def refused(one, verb, ran):
    if ran.code == 0:
        return [] if verb in one.passing else ["it passed"]
    return [] if re.search(one.said, ran.said) or verb in one.passing else [f"it does not say {one.said!r}"]


def check(commands, runner, here, judge):
    """Runs each verb on the input. `judge(verb, ran)`: lines on what is wrong with how it ended, besides `faults`."""
    before, wrong = tree(here), {}
    for verb, words in commands.items():
        ran = runner.run(words, here)
        if found := faults(ran, here, before) + judge(verb, ran):
            wrong[verb] = found, ran.said[-1500:]
        shutil.rmtree(here / "out")
        (here / "out").mkdir()
    assert wrong == {}


def check_passes(base, runner, here, make=lambda root: None):
    linked(runner.sound / base, here / "in")
    make(here / "in")
    every = commands(base, runner.sound)
    check(every, runner, here, lambda verb, ran: [f"exit code {ran.code}"] if ran.code else [])


@pytest.mark.parametrize("base", [base for base in COMMANDS if base not in WITHOUT_CONTROL])
def test_sound_input_passes_every_verb(base, runner, here):
    check_passes(base, runner, here)


@pytest.mark.parametrize("name", links.SOUND)
def test_links_that_stay_in_the_checkpoint_pass(name, runner, here):
    base, make = links.SOUND[name]
    check_passes(base, runner, here, make)


def chosen(one):
    """The verbs that a case is given to: one in turn, so that every verb has many; all of them with ALL_VERBS."""
    verbs = list(one.verbs or COMMANDS[one.base])
    return verbs if ALL_VERBS else [verbs[list(CASES).index(one.name) % len(verbs)]]


def test_every_verb_is_given_many_hostile_inputs():
    given = Counter(COMMANDS[one.base][verb].split()[0] for one in CASES.values() for verb in chosen(one))
    verbs = set(LazyGroup().list_commands(Context(cli))) - {"doctor", "gate"}  # which read no file that is given
    assert set(given) == verbs | {"hook"}
    assert min(given.values()) >= 5
    assert len(CASES) >= 150


@pytest.mark.parametrize("name", daily(CASES, list(CASES)[::5]))
def test_hostile_input_is_refused_cleanly(name, runner, here):
    one = CASES[name]
    linked(runner.sound / one.base, here / "in")
    values = one.make(here / "in")
    every = commands(one.base, runner.sound, **(values if isinstance(values, dict) else {}))
    check({verb: every[verb] for verb in chosen(one)}, runner, here, partial(refused, one))


_MUTATED = {
    "hf": ("inspect in", "lint in", "convert in out/megatron --dry-run"),
    "int4": ("inspect in", "lint in", "convert in out/megatron --dry-run"),
    "megatron": ("inspect in", "convert in out/hf --dry-run"),
}
_VERIFIED = ("verify in", "verify in --json")
_LIMIT_S = 5.0


def empty_findings(printed):
    if not printed.startswith("{"):
        return []
    report, _ = json.JSONDecoder().raw_decode(printed)
    return [str(one) for one in report["findings"] if not (one["expected"].strip() and one["actual"].strip())]


def test_mutated_checkpoint_breaks_no_promise(runner, tmp_path):
    wrong = {}
    distinct = set()
    codes = Counter()

    examples, enough = (1_000, 600) if ALL_VERBS else (120, 62)
    plain = settings(max_examples=examples, derandomize=True, deadline=None, database=None, phases=[Phase.generate])

    @plain
    @given(st.sampled_from(list(_MUTATED)), mutations())
    def mutate(base, changes):
        if (base, changes) in distinct or len(distinct) == enough:
            return
        here = tmp_path / f"input-{len(distinct)}"
        for name in ("out", "tmp", "outside"):
            (here / name).mkdir(parents=True)
        linked(runner.sound / base, here / "in")
        sound = tree(here)
        for change in changes:
            change.apply(here / "in")
        if (before := tree(here)) == sound:  # there is no such file, or it is so already
            shutil.rmtree(here)
            return
        distinct.add((base, changes))
        turn = len(distinct)
        others = _MUTATED[base]
        given_to = (*_VERIFIED, *others) if ALL_VERBS else (_VERIFIED[turn % 2], others[turn % len(others)])
        for words in given_to:
            ran = runner.run(words.split(), here)
            codes[ran.code] += 1
            found = faults(ran, here, before) + empty_findings(ran.said)
            found += [f"it took {ran.seconds:.1f} s"] if ran.seconds > _LIMIT_S else []
            found += [f"left: {path.name}" for path in (here / "out").iterdir()]
            if found:
                wrong[f"{base}, {changes}: {words}"] = found, ran.said[-1500:]
        shutil.rmtree(here)

    mutate()
    assert wrong == {}
    assert len(distinct) == enough
    assert codes[1] + codes[2] > codes.total() // 2  # the others changed what the verb does not read
