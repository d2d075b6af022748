"""FP8, which is off."""

import contextlib


class FP8GlobalStateManager:
    """The state of FP8 for the whole process."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Off."""
        return False


def fp8_autocast(*arguments: object, **keywords: object) -> contextlib.AbstractContextManager[None]:
    """No autocast."""
    return contextlib.nullcontext()


fp8_model_init = fp8_autocast
