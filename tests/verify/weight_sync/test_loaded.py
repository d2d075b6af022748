"""Which checkpoint a model is compared with before its first log-probabilities, and what is said where it cannot be."""

from argparse import Namespace

import pytest
from torch import nn

from ckptkit import CkptkitError
from ckptkit.hooks import before_log_prob
from ckptkit.verify.weight_sync.loaded import locate_loaded, parameters_asked_for


def root(path, tracker, *iterations):
    for iteration in iterations:
        (path / iteration).mkdir(parents=True)
        (path / iteration / ".metadata").touch()
    (path / "latest_checkpointed_iteration.txt").write_text(tracker)
    return path


def test_option_of_each_prefix_is_followed(tmp_path):
    roots = {
        name: str(root(tmp_path / name, "release", "release")) for name in ("load", "ref_load", "opd_teacher_load")
    }
    for prefix, name in (("", "load"), ("ref_", "ref_load"), ("teacher_", "opd_teacher_load")):
        assert locate_loaded(Namespace(**roots), prefix).path == tmp_path / name / "release"
    assert locate_loaded(Namespace(**roots | {"load": None}), "").path == tmp_path / "ref_load/release"


def test_iteration_is_that_of_the_step_unless_it_is_a_release(tmp_path):
    load = root(tmp_path / "run", "20", "iter_0000010", "iter_0000020")
    assert locate_loaded(Namespace(load=str(load), ckpt_step=None), "").path == load / "iter_0000020"
    assert locate_loaded(Namespace(load=str(load), ckpt_step=0), "").path == load / "iter_0000020"
    of_step = locate_loaded(Namespace(load=str(load), ckpt_step=10), "")
    assert (of_step.path, of_step.root) == (load / "iter_0000010", load)
    release = root(tmp_path / "release", "release", "release")
    assert locate_loaded(Namespace(load=str(release), ckpt_step=10), "").path == release / "release"
    of_reference = locate_loaded(Namespace(ref_load=str(load), ref_ckpt_step=10), "ref_")
    assert of_reference.path == load / "iter_0000010"


def test_variable_says_how_many_parameters_are_compared(monkeypatch):
    monkeypatch.delenv("CKPTKIT_COMPARED_PARAMETERS", raising=False)
    assert parameters_asked_for() == 16
    for given, expected in (("0", 0), ("200", 200), ("all", None)):
        monkeypatch.setenv("CKPTKIT_COMPARED_PARAMETERS", given)
        assert parameters_asked_for() == expected
    monkeypatch.setenv("CKPTKIT_COMPARED_PARAMETERS", "some")
    with pytest.raises(CkptkitError, match="CKPTKIT_COMPARED_PARAMETERS is 'some'"):
        before_log_prob(Namespace(load="/absent"), [nn.Linear(2, 2)], "")
    with pytest.raises(CkptkitError, match="old_actor_"):
        locate_loaded(Namespace(load="/ckpt"), "old_actor_")
