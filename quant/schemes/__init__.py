"""Schemes that weights can be quantized to, behind one protocol. A scheme is a module here and a row in `registry`."""
