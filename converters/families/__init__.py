"""One file per model family, with all facts that are specific to it. The folder has no other files.

Each lists its kinds of models in `FAMILIES`, where the registry finds them.
"""
