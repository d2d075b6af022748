"""One file a family of models, with everything that is particular to it, and no file beside them.

Each lists its kinds of models in `FAMILIES`, where the registry finds them.
"""
