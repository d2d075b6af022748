"""Explains tensors that hold each other's values: layers, pipeline stages, experts and projections."""
