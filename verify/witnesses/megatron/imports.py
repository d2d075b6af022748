"""Lets megatron-core be imported on a machine without a GPU; to be imported before anything of it, in processes of the witness only.

megatron-core 0.19 imports `flash_mla` where it is installed, and takes only an ImportError for "not installed". Without a CUDA driver
that package fails with an OSError. Its kernels run on a GPU alone, so without one it counts as not installed.
"""

from __future__ import annotations

import sys

import torch

if not torch.cuda.is_available():
    sys.modules["flash_mla"] = None  # type: ignore[assignment]  # what Python documents for "raise ModuleNotFoundError"
