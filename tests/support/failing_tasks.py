"""Runs on a Ray cluster in which one task fails while others end: `python failing_tasks.py ADDRESS ROUNDS`."""

import sys

from ckptkit.core.errors import CkptkitError
from ckptkit.transfer.ray import outcomes, ray_cluster

PIECES = [["ends"]] * 8 + [["fails"]] + [["ends"]] * 40


def fail_or_end(told, piece):
    if piece == ["fails"]:
        raise CkptkitError("a piece that fails", "")


def main(address, rounds):
    from failing_tasks import fail_or_end  # under the name by which a worker finds it

    failed, stopped = 0, list[None]()
    with ray_cluster(address) as ray:
        for _ in range(rounds):
            try:
                list(outcomes(ray, fail_or_end, None, PIECES, workers=12, stop=lambda: stopped.append(None)))
            except CkptkitError as error:
                failed += error.message == "a piece that fails"
    print(f"{failed} failed, {len(stopped)} stopped")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
