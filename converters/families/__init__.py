"""One file a model family, with everything that is particular to it.

The registry finds every file here and in the folders below.

Each file lists its families in `FAMILIES`.
"""
