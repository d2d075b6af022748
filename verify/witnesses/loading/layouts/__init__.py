"""Layouts of a layer's parameters after an engine repacked them for a kernel, computed from the loaded ones.

Each engine's adapter chooses the layout of a layer. A known layout is compared bit for bit. An unknown one is compared
by running its kernel on unit vectors (`layout.products`), which shows less: it rounds, and mixes experts' two matrices.
"""
