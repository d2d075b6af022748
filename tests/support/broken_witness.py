"""A Megatron witness with a defect, which the environment variable BREAK chooses."""

from __future__ import annotations

import os
import signal
from typing import Any

HOW = os.environ["BREAK"]
if HOW == "import":
    raise OSError("libcuda.so.1: cannot open shared object file")

from verify.witnesses.megatron import process as witness_megatron  # noqa: E402
from verify.witnesses.megatron.model import GPTModel  # noqa: E402


def _defect(*_: Any) -> Any:
    raise KeyError("a defect of ours")


def _kill(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Runs the rank, broken."""
    if HOW == "own":
        witness_megatron.position = _defect
    if HOW == "kill":
        witness_megatron.connect = _kill
    if HOW == "signature":  # as of a megatron-core whose method takes other arguments than the one that we know
        GPTModel.sharded_state_dict = lambda self: {}
    witness_megatron.main()


if __name__ == "__main__":
    main()
