"""A skip is enough for `--strict` to exit 1."""

import pytest
import torch
from click.testing import CliRunner

from ckptkit.app.cli import cli


@pytest.fixture
def without_arguments(converted, copy_of):
    """A sound Megatron checkpoint of which CK114 and CK701 cannot say anything."""
    path = copy_of(converted("qwen2-tied"))
    common = torch.load(path / "release" / "common.pt", weights_only=False)
    del common["args"]
    torch.save(common, path / "release" / "common.pt")
    return path


@pytest.mark.parametrize("command", [["verify"], ["preflight", "--load"]])
def test_a_skip_passes_unless_strict_is_asked_for(command, without_arguments):
    words = [*command, str(without_arguments)]
    assert CliRunner().invoke(cli, words).exit_code == 0
    strict = CliRunner().invoke(cli, [*words, "--strict"])
    assert strict.exit_code == 1
    assert strict.stderr == "--strict: skipped CK114, CK701\n"
    assert strict.stdout.splitlines()[-1].startswith("PASSED")
    # `test_right_launches.py` has the twin of which nothing is skipped.
