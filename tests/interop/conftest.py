"""Marks every test of this folder as `interop`, and finds the checkouts of tools that no package index has."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
# The environment variable that names the checkout, and the repository that it is of.
REPOSITORIES = {
    "MEGATRON_LM": "https://github.com/NVIDIA/Megatron-LM",
    "SLIME": "https://github.com/THUDM/slime",
    "MILES": "https://github.com/radixark/miles",
    "MILES_MEGATRON_LM": "https://github.com/radixark/Megatron-LM, branch miles-main",
    "VERL": "https://github.com/verl-project/verl",
    "NEMO_RL": "https://github.com/NVIDIA-NeMo/RL",
    "ROLL": "https://github.com/alibaba/ROLL",
}


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items):
    """The marker that pyproject.toml deselects by default: no file of this folder can forget it."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("interop")


@pytest.fixture(scope="session")
def checkout():
    """`checkout("SLIME")`: the directory that the environment variable names. Without one the test is skipped."""

    def find(variable):
        if not os.environ.get(variable):
            pytest.skip(f"needs {variable}=/path/to/a/checkout of {REPOSITORIES[variable]}")
        path = Path(os.environ[variable]).resolve()
        if not path.is_dir():
            pytest.fail(f"{variable}={path} is not a directory", pytrace=False)
        return path

    return find
