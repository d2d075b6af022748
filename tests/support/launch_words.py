"""Words of a launch as the tests write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptkit.verify.launch.arguments import LaunchArguments, launch_arguments
from ckptkit.verify.launch.options.arguments import parse_arguments
from ckptkit.verify.launch.words import Word


def arguments_of(words: Sequence[str], environment: Mapping[str, str] | None = None) -> LaunchArguments:
    """What texts say of the parallel sizes of a launch."""
    found = [Word(word) for word in words]
    return launch_arguments(parse_arguments(found), found, environment)
