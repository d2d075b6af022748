"""Which versions of the libraries under test are installed, for tests whose truth differs between them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest


def release(package: str) -> tuple[int, ...]:
    """(major, minor, patch) of an installed package; () where it is missing, which is before every release."""
    try:
        return tuple(int(part) for part in version(package).split("+")[0].split(".")[:3] if part.isdigit())
    except PackageNotFoundError:
        return ()


def before(package: str, first: tuple[int, ...], reason: str) -> pytest.MarkDecorator:
    """Marks a test of what a package did before its release `first`, with the reason why it no longer holds."""
    return pytest.mark.skipif(
        release(package) >= first, reason=f"{package} {'.'.join(map(str, release(package)))}: {reason}"
    )


def since(package: str, first: tuple[int, ...], reason: str) -> pytest.MarkDecorator:
    """Marks a test of what a package does from its release `first` on, with the reason why it did not before."""
    return pytest.mark.skipif(
        release(package) < first, reason=f"{package} {'.'.join(map(str, release(package)))}: {reason}"
    )
