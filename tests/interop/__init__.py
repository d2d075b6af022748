"""Other tools run on what ckptkit writes, and ckptkit on what they write: `make test-interop`, not `make test`.

One file a tool. What it needs beyond ckptkit's own environment is in `requirements/`, under the tool's name.
"""
