"""Megatron witness ranks with Transformer Engine's layers, no GPU: `python -m support.engine_runs JOB.json...`.

Transformer Engine makes no module without a GPU, though it needs one only to compute. While a model is built it is told
that there is one; what the model asks of a checkpoint, and what it then holds, is the same.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch

from ckptkit.verify.witnesses.megatron import model as megatron_model
from ckptkit.verify.witnesses.megatron import process as witness_megatron


@contextlib.contextmanager
def told_of_a_gpu():
    """As `_default_device` of the model's builder: the CPU, and word of an H100."""
    properties = SimpleNamespace(name="H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30)
    answers = {"is_available": True, "get_device_capability": (9, 0), "get_device_properties": properties}
    with torch.device("cpu"), megatron_model.OnCpu(), contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer))
        yield


if __name__ == "__main__":
    megatron_model._default_device = told_of_a_gpu
    witness_megatron.main()
