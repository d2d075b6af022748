"""The table of lab/faults.md, made of the cells: `python -m faults.table` writes it."""

from pathlib import Path

from faults.cells import CELLS

PAGE = Path(__file__).resolve().parents[2] / "lab/faults.md"
BEGIN, END = "<!-- cells -->\n", "<!-- end of cells -->\n"


def table():
    rows = {}
    for cell in CELLS:
        left = f"{cell.outcome} ({cell.code})" if cell.code >= 0 else cell.outcome
        rows.setdefault((cell.fault, cell.verb), {}).setdefault(left, []).append(cell.phase)
    lines = []
    for (fault, verb), found in sorted(rows.items()):
        phases = "; ".join(f"{', '.join(named)}: {left}" for left, named in found.items())
        lines.append(f"| {fault} | {verb} | {phases} |\n")
    return "".join(["| fault | verb | phase: what is left (exit code) |\n", "| --- | --- | --- |\n", *lines])


def parts():
    before, _, rest = PAGE.read_text().partition(BEGIN)
    found, _, after = rest.partition(END)
    return before, found, after


if __name__ == "__main__":
    before, _, after = parts()
    PAGE.write_text(before + BEGIN + table() + END + after)
