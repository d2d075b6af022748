"""A stand-in for Transformer Engine on a machine without CUDA: the parameters of its layers, and no computation.

megatron-core wraps these classes in its own (`megatron/core/extensions/transformer_engine.py`), and those name, cut,
save and load the parameters. Bridges build models of them, so that what they do with weights can be run on the CPU.
Names and shapes of the parameters follow Transformer Engine 2.3; without FP8 a layer's extra state is empty.
"""

from transformer_engine import common, pytorch

__all__ = ["__version__", "common", "pytorch"]
__version__ = "2.3.0"
