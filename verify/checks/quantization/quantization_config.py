"""What is wrong with a `quantization_config` beside packed weights, so that readers refuse it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.side_files import quantization_of
from quant.formats.compressed import stated_scheme
from verify.evidence.packed import format_of
from verify.issue import Issue
from verify.skip import Unable

# Of a valid compressed-tensors scheme, what may differ from what is judged here; with these values it would be judged.
_JUDGED = {"symmetric": True, "num_bits": 4, "strategy": "group", "group_size": 32, "actorder": None, "zp_dtype": None}


def config_issue(config: Mapping[str, Any]) -> Issue | None:
    """Why engines cannot read the packed weights by this `quantization_config`; None when they can.

    Raises Unable for a scheme that is valid compressed-tensors and is not judged here, such as an asymmetric one.
    """
    content = quantization_of(config)
    hint = "restore the quantization_config of the release, or quantize again with `ckptkit quantize`"
    expected = "a quantization_config that describes the packed weights"
    if not isinstance(content, Mapping) or not content:
        return Issue(expected, f"quantization_config is {content!r:.80}", hint)
    try:
        stated_scheme(config)
    except CkptkitError as error:
        if format_of(config) is not None and _valid_elsewhere(config):
            raise Unable(f"no decision for this quantization_config: {error.message}") from error
        return Issue(expected, error.message, hint)
    return None if format_of(config) is not None else Issue(expected, "its first group spells out no weights", hint)


def _valid_elsewhere(config: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors takes the scheme, which is not judged here only for the way it rounds weights."""
    from compressed_tensors.quantization import QuantizationConfig

    content = quantization_of(config)
    if not all(
        isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
        for group in content["config_groups"].values()
    ):
        return False
    groups = {
        name: {**group, "weights": {**group["weights"], **_JUDGED}} for name, group in content["config_groups"].items()
    }
    try:
        QuantizationConfig.model_validate(dict(content))
        stated_scheme({**config, "quantization_config": {**content, "config_groups": groups}})
    except (CkptkitError, ValueError, TypeError, KeyError, NotImplementedError):
        return False
    return True
