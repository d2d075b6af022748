"""Measures what BENCH_ARGS of `make bench` names, or everything: a table for each section, and bench.json with all.

With BENCH_SMALLEST=1 each runs once, on the smallest model it has: that shows whether it runs, not how fast.

A section is a module beside this one (of its name, or in `_MODULES`) with a function `rows()`, which returns data.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SECTIONS = (
    *("kernels", "cuda", "offline", "convert", "scale", "verifier", "witness", "megatron", "layouts", "plan"),
    *("launches", "ray", "quality"),
)
_MODULES = {"ray": "ray_scaling", "megatron": "megatron_load"}  # where the section's name is a package's


def main(chosen: list[str]) -> None:
    """Measures, prints and writes the sections `chosen`, or all of them. Raises SystemExit for a name that is none."""
    if unknown := [name for name in chosen if name not in SECTIONS]:
        raise SystemExit(f"unknown section {unknown[0]!r}: choose from {', '.join(SECTIONS)}")
    found: dict[str, list[dict[str, Any]]] = {}
    console = Console()
    for name in chosen or SECTIONS:
        module = import_module(_MODULES.get(name, name))
        found[name] = module.rows()
        console.print((module.__doc__ or name).strip().partition("\n")[0])
        console.print(_table(found[name]) if found[name] else "nothing to measure on this machine")
    Path("bench.json").write_text(json.dumps(found, indent=2) + "\n")


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        table.add_column(column, justify="left" if isinstance(rows[0].get(column), str) else "right")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    return table


if __name__ == "__main__":
    main(sys.argv[1:])
