"""ModelOpt's MXFP8 and NVFP4 of every matrix in a safetensors file.

Written to another file under `mxfp8.NAME` and `nvfp4.NAME`, with scales `_scale`, and `_scale_2` of NVFP4: one for all
matrices whose names begin alike, up to a dot.
"""

import sys
from collections import defaultdict

import torch
from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import load_file, save_file


def main():
    written = {}
    sets = defaultdict(dict)
    for name, weight in load_file(sys.argv[1]).items():
        quantized, scales = MXFP8QTensor.quantize(weight)
        written |= {f"mxfp8.{name}": quantized._quantized_data.contiguous(), f"mxfp8.{name}_scale": scales}
        sets[name.partition(".")[0]][name] = weight
    for weights in sets.values():
        shared = torch.stack([NVFP4QTensor.get_weights_scaling_factor_2(weight) for weight in weights.values()]).amax()
        for name, weight in weights.items():
            quantized, scales, second = NVFP4QTensor.quantize(weight, 16, weights_scaling_factor_2=shared)
            parts = {"": quantized._quantized_data.contiguous(), "_scale": scales, "_scale_2": second.clone()}
            written |= {f"nvfp4.{name}{ending}": part for ending, part in parts.items()}
    save_file(written, sys.argv[2])


main()
