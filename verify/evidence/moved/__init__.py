"""What stands in another's place: layers, pipeline stages, experts and projections, told from single tensors.

May import the other modules of `verify/evidence/` and what these may import.
"""
