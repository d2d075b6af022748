"""Other tools run on what ckptkit writes, and ckptkit on what they write. Run by `make test-interop`, not by `make test`.

One file a tool. What it needs beyond ckptkit's own environment is in `requirements/`, under the tool's name.
"""
