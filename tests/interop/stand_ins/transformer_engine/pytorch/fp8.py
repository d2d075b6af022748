"""FP8, which is off."""

import contextlib


class FP8GlobalStateManager:
    """The state of FP8 for the whole process."""

    @staticmethod
    def is_fp8_enabled():
        """Off."""
        return False


def fp8_autocast(*arguments, **keywords):
    """No autocast."""
    return contextlib.nullcontext()


fp8_model_init = fp8_autocast
