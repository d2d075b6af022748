"""Schemes that weights can be quantized to, behind one protocol. A scheme is a module here and a row in `registry`."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.formats",
    "converters",
    "quant.formats",
    "quant.kernels",
    "quant.patterns",
    "quant.requantize",
    "quant.selection",
)
