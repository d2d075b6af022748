"""`python -m ckptkit`."""

from __future__ import annotations

from ckptkit.cli import main

main()
