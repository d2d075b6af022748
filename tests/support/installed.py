"""Which versions of the libraries under test are installed, for tests whose truth differs between them."""

from importlib.util import find_spec

import pytest

from ckptkit.core.installation import package_release as release


def before(package, first, reason):
    """Marks a test of what a package did before its release `first`, with the reason why it no longer holds."""
    return pytest.mark.skipif(
        release(package) >= first, reason=f"{package} {'.'.join(map(str, release(package)))}: {reason}"
    )


def since(package, first, reason):
    """Marks a test of what a package does from its release `first` on, with the reason why it did not before."""
    return pytest.mark.skipif(
        release(package) < first, reason=f"{package} {'.'.join(map(str, release(package)))}: {reason}"
    )


def require_megatron():
    """Skips the test, or all of a module, where megatron-core is missing. It is not imported, which takes seconds."""
    if find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed", allow_module_level=True)
