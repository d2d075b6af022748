"""Which Ray cluster is worked on, and what is said where there is none."""

import socket
import sys
import tempfile
from pathlib import Path

import pytest
from support.messages import text_with

from ckptkit.core.errors import CkptkitError
from ckptkit.transfer.ray import ray_cluster


def refused(address):
    with pytest.raises(CkptkitError) as error, ray_cluster(address):
        pass
    return error.value


ray = pytest.importorskip("ray")


@pytest.fixture
def closed_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_addresses_where_no_cluster_is(closed_port, monkeypatch):
    address = f"127.0.0.1:{closed_port}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    for given in (address, "auto"):
        error = refused(given)
        assert error.message == text_with(f"Ray {address}")
        assert error.message.endswith("Connection refused")
        assert error.hint == text_with("ray start --head --ray")
    error = refused("ray://head:10001")  # of Ray's client
    assert (error.message, error.hint) == (text_with("ray://head:10001"), text_with("--ray --ray"))
    assert refused("head").message == text_with("connection Ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert str(refused("auto")) == "Ray is not installed\n  next: pip install ray"


def test_a_cluster_of_its_own_ends_with_the_work(closed_port, monkeypatch):
    with tempfile.TemporaryDirectory() as folder:  # Ray's sockets lie below it, and their paths must be short
        monkeypatch.setenv("RAY_TMPDIR", folder)
        file = Path(folder, "ray", "ray_current_cluster")
        file.parent.mkdir()
        file.write_text(f"127.0.0.1:{closed_port}")
        mode = ray._raylet.get_authentication_mode()
        with ray_cluster("auto", 2) as here:
            assert here.cluster_resources()["CPU"] == 2
            assert here.get(here.remote(lambda: 6 * 7).remote()) == 42
            with ray_cluster("auto") as again:  # a process that is connected stays so
                assert again.cluster_resources()["CPU"] == 2
            assert ray.is_initialized()
        assert not ray.is_initialized()
        assert ray._raylet.get_authentication_mode() == mode  # or a cluster that another program starts is not reached
