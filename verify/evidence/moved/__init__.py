"""Explains tensors that hold each other's values: layers, pipeline stages, experts and projections.

May import the other modules of `verify/evidence/` and what these may import.
"""
