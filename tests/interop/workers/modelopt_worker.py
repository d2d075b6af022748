"""ModelOpt's MXFP8 of every matrix in a safetensors file, written beside its exponents `NAME_scale` to another file."""

from __future__ import annotations

import sys

from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor
from safetensors.torch import load_file, save_file


def main() -> None:
    """The file to read, and the one to write."""
    written = {}
    for name, weight in load_file(sys.argv[1]).items():
        quantized, scales = MXFP8QTensor.quantize(weight)
        written |= {name: quantized._quantized_data.contiguous(), f"{name}_scale": scales}
    save_file(written, sys.argv[2])


main()
