"""What transformers' class of a config takes for a key that config.json lacks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final

UNKNOWN: Final = "not there"


def class_default(config: Mapping[str, Any], path: tuple[str, ...], stated: Any) -> Any:
    """The default of the key at `path` (`text_config`, `head_dim`), of which another config has the value `stated`.

    UNKNOWN where it is not known or is computed: a default of None stands for a number or list that is made of others,
    but for a switch or a factor that is off.
    """
    if find_spec("transformers") is None:
        return UNKNOWN
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    for part in path[:-1]:
        config = config[part] if isinstance(config.get(part), Mapping) else {}
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING_NAMES:
        return UNKNOWN
    parameter = inspect.signature(CONFIG_MAPPING[model_type].__init__).parameters.get(path[-1])
    default = UNKNOWN if parameter is None else parameter.default
    if default is None:
        return None if type(stated) in (bool, float) else UNKNOWN
    return default if type(default) in (bool, int, float, str) else UNKNOWN
