"""The matrix mutation x check: `make mutation-report` prints which codes each mutation fires."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mutations import MUTATIONS
from mutations.mutation import Mutation
from mutations.running import Outcome, run
from mutations.starts import Starts

# What a cell says: the code that the registry expects, another that was found as well, none.
EXPECTED, ALSO, NONE = "X", "+", "."


def outcomes(work: Path) -> Iterator[tuple[Mutation, str, Outcome]]:
    """Every mutation on every checkpoint it is for; what happens is told on stderr, since it takes minutes."""
    starts = Starts(work)
    for mutation in MUTATIONS:
        for label in mutation.on:
            with tempfile.TemporaryDirectory(dir=work) as place:
                outcome = run(mutation, label, starts, Path(place))
            print(f"{mutation.name}, {label}: {outcome.missed or 'found'}", file=sys.stderr)
            yield mutation, label, outcome


def matrix(found: list[tuple[Mutation, str, Outcome]]) -> Iterator[str]:
    """One line a mutation and checkpoint: level, name, checkpoint, a cell for every code that fired anywhere."""
    codes = sorted(
        {finding.code for _, _, outcome in found for finding in outcome.report.findings}
        | {mutation.code for mutation, _, _ in found}
    )
    width = max(len(f"{mutation.name}, {label}") for mutation, label, _ in found)
    yield f"{'level':13} {'mutation, checkpoint':{width}} " + " ".join(code.removeprefix("CK") for code in codes)
    for mutation, label, outcome in found:
        fired = {finding.code for finding in outcome.report.findings}
        cells = (
            f"{EXPECTED if code == mutation.code else ALSO:^3}" if code in fired else f"{NONE:^3}" for code in codes
        )
        yield (
            f"{mutation.level:13} {f'{mutation.name}, {label}':{width}} "
            + " ".join(cells)
            + (f"  MISSED: {outcome.missed}" if outcome.missed else "")
        )


def main() -> int:
    """Prints the matrix; returns 1 when a mutation was missed."""
    with tempfile.TemporaryDirectory() as work:
        found = list(outcomes(Path(work)))
    print("\n".join(matrix(found)))
    missed = sum(outcome.missed is not None for _, _, outcome in found)
    print(
        f"\n{len(MUTATIONS)} mutations, {len(found)} runs, {missed} missed. "
        f"{EXPECTED}: the code expected, {ALSO}: found as well. Codes are those of CK."
    )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
