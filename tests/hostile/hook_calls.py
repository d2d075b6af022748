"""Calls a hook of a job on an input, as a trainer does: `hook NAME INPUT SOUND`, with the release that it trains."""

from argparse import Namespace
from pathlib import Path

from ckptkit.app.hooks import check_launch
from ckptkit.converters.megatron.arguments import megatron_args
from ckptkit.converters.planner import dims_of
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import read_json
from ckptkit.hooks import after_init, after_save, after_weight_write


def call(words):
    """Calls the hook. Prints what it raises as its traceback ends, and returns 1; else 0."""
    name, given, sound = words
    trained = Namespace(hf_checkpoint=sound)
    try:
        match name:
            case "after_init":
                dims = dims_of(read_json(Path(sound, "config.json")))
                after_init(Namespace(hf_checkpoint=given, **megatron_args(dims)))
            case "after_save":
                after_save(trained, 1, given, None)
            case "after_write" | "after_delta":
                after_weight_write(trained, given, ())
            case "verl":
                check_launch([f"actor_rollout_ref.model.path={given}"])
    except CkptkitError as error:
        print(f"error: {error}")
        return 1
    return 0
