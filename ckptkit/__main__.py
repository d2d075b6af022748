"""`python -m ckptkit`."""

from __future__ import annotations

from ckptkit.app.cli import main

main()
