"""Which Ray cluster is worked on, and what is said where there is none."""

from __future__ import annotations

import socket
import sys
import tempfile
from pathlib import Path

import pytest
from support.messages import text_with

from ckptkit.core.errors import CkptkitError
from ckptkit.transfer.ray import ray_cluster


def refused(address: str) -> CkptkitError:
    with pytest.raises(CkptkitError) as error, ray_cluster(address):
        pass
    return error.value


@pytest.fixture
def closed_port() -> int:
    """A port of this machine where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert str(refused("auto")) == "Ray is not installed\n  next: pip install ray"


def test_an_address_where_nothing_answers(closed_port: int) -> None:
    pytest.importorskip("ray")
    error = refused(f"127.0.0.1:{closed_port}")
    assert error.message == text_with(f"Ray 127.0.0.1:{closed_port}")
    assert error.message.endswith("Connection refused")
    assert error.hint == text_with("ray start --head --ray")


def test_an_address_from_the_environment(closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed_port}")
    assert f"127.0.0.1:{closed_port}: " in refused("auto").message


def test_an_address_of_rays_client() -> None:
    pytest.importorskip("ray")
    error = refused("ray://head:10001")
    assert error.message == text_with("ray://head:10001")
    assert error.hint == text_with("--ray --ray")


def test_an_address_that_is_none() -> None:
    pytest.importorskip("ray")
    assert refused("head").message == text_with("connection Ray")


def test_a_cluster_of_its_own_ends_with_the_work() -> None:
    ray = pytest.importorskip("ray")
    with ray_cluster("local", 2) as here:
        assert here.cluster_resources()["CPU"] == 2
        assert here.get(here.remote(lambda: 6 * 7).remote()) == 42
        with ray_cluster("auto") as again:  # a process that is connected stays so
            assert again.cluster_resources()["CPU"] == 2
        assert ray.is_initialized()
    assert not ray.is_initialized()


def test_a_cluster_that_crashed_is_not_waited_for(closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    with tempfile.TemporaryDirectory() as folder:  # Ray's sockets lie below it, and their paths must be short
        monkeypatch.setenv("RAY_TMPDIR", folder)
        file = Path(folder, "ray", "ray_current_cluster")
        file.parent.mkdir()
        file.write_text(f"127.0.0.1:{closed_port}")
        with ray_cluster("auto", 2) as ray:
            assert ray.cluster_resources()["CPU"] == 2
