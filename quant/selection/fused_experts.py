"""Checks that the installed transformers can load packed experts: one that holds them fused cannot.

transformers 5 builds the routed experts of a layer as one parameter of three axes, so that targets of Linear modules
never reach them. It then initializes them anew, and only logs the names that it found and did not know.
Source: transformers 5.12.1, `AutoModelForCausalLM.from_pretrained`, run in `tests/interop/test_transformers.py`. Later
versions may take experts that a `re:` target names (`integrations/compressed_tensors.py`; read, not run).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.side_files import quantization_of
from quant.selection.class_tree import release_of
from quant.selection.readers import ALL_READERS

READER = "transformers"
UNPACKED = r"leave the experts unpacked: --ignore 're:.*\.experts\..*'"
_INTEGRATION = "transformers.integrations.compressed_tensors"


def fused_in_transformers(config: Mapping[str, Any]) -> str | None:
    """What transformers does with packed experts of this model, where it cannot load them; None where it can.

    Also None for a model that transformers has no class for: its release brings its own. Raises CkptkitError as
    `release_of` and `quant.selection.meta_model.text_model`.
    """
    if _named(config) and find_spec(_INTEGRATION) is not None:
        return None
    # Imported here because it takes seconds.
    from quant.selection.meta_model import is_known, text_model
    from quant.selection.meta_tree import is_fused_experts

    if not is_known(config.get("model_type")):
        return None
    release = release_of(config)
    if release.own_tree:
        return f"transformers {version('transformers')} has other modules than the release"
    model = text_model(release, config)
    name = next((type(module).__name__ for module in model.modules() if is_fused_experts(module)), None)
    if name is None:
        return None
    return f"transformers {version('transformers')} holds them fused ({name}), and initializes them anew"


def refuse_for_transformers(config: Mapping[str, Any], where: str, readers: Iterable[str]) -> None:
    """Raises CkptkitError where transformers is a chosen reader of packed experts and cannot load them.

    All readers are the default, and no choice.
    """
    chosen = set(readers)
    if READER not in chosen or chosen == set(ALL_READERS):
        return
    if (reason := fused_in_transformers(config)) is not None:
        what = f"{where}: packed experts are not for --reader {READER}: {reason}"
        raise CkptkitError(what, f"leave out --reader {READER}, or {UNPACKED}")


def _named(config: Mapping[str, Any]) -> bool:
    """Whether a target of quantization_config names experts by a regular expression."""
    content = quantization_of(config)
    groups = content.get("config_groups") if isinstance(content, Mapping) else None
    targets = (
        target
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        for target in (group.get("targets") or () if isinstance(group, Mapping) else ())
    )
    return any(isinstance(target, str) and target.startswith("re:") and "experts" in target for target in targets)
