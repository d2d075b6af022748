"""What every dry run of these tests leaves out."""

import pytest

from ckptkit.app import forecast


@pytest.fixture(autouse=True)
def _unmeasured(monkeypatch):
    """A dry run measures the disk for a second, which is none of the matter here."""

    def refuse(*_):
        raise OSError("not measured here")

    monkeypatch.setattr(forecast, "disk_rates", refuse)
