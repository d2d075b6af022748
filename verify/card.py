"""Makes an audit card: the report of `verify` and a digest of every tensor, from one reading, for others to repeat."""

from __future__ import annotations

import json
import os
import platform
import resource
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Unpack

from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.core.installation import program_version
from ckptkit.core.printable import json_text
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.detect import LOADED
from ckptkit.storage.digest import TensorDigest
from ckptkit.storage.whole import write_whole
from ckptkit.transfer.manifest import described_files, digest_of_all, replaceable_manifest, write_manifest
from ckptkit.transfer.signature import refuse_signed, sign_manifest, signer
from converters.passthrough import FOLDER
from verify.evidence.reading import read_values, stored_values
from verify.evidence.subject import Subject
from verify.options import GivenVerifyOptions
from verify.report import Report
from verify.reports.card import Card, page
from verify.run import report_on, stage_of, subject_of

_LIBRARIES = ("torch", "transformers", "safetensors", "compressed-tensors")


def make_card(
    path: str | Path,
    output: Path,
    source: str | Path | None = None,
    hf: str | Path | None = None,
    *,
    command: Sequence[str] = (),
    sign: Path | None = None,
    **options: Unpack[GivenVerifyOptions],
) -> Report:
    """Verifies as `verify.run.verify`, and writes the card to `output`, which ends in .md, and beside it as JSON.

    The JSON is a manifest of the checkpoint, for `verify --manifest`, which also has the report. `sign` is the private
    key that signs it, as it does a manifest. `command` is the one that repeats it.

    Raises CkptkitError as `verify`, where a card is there already, and where the key cannot be used.
    """
    digests = _free(output, path)
    by = signer(sign) if sign else None
    if by is not None:
        refuse_signed(digests)
    started = time.monotonic()
    subject = subject_of(path, source, hf, **options)
    if (stage := stage_of(subject)) is not None:
        hint = "an adapter and deltas become one with `ckptkit convert`; of a draft model, verify with --report page.md"
        raise UsageError(f"{path} is not a full checkpoint ({stage})", hint)
    report = report_on(subject, path, source, command)
    tensors, files = _digests(subject)
    card = Card(
        report,
        command,
        [TensorSpec(name, one.shape, one.dtype) for name, one in tensors.items()],
        digest_of_all(tensors) if tensors else None,
        digests,
        sign is not None,
        _versions(),
        f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}",
        round(time.monotonic() - started, 1),
        _memory(started=bool(subject.against)),
    )
    # As in every report, names that no parser takes are spelled.
    found = json.loads(json_text(report.to_json()))
    write_manifest(digests, command, tensors, files, {"card": _facts(card), "report": found})
    if by is not None:
        sign_manifest(digests, by)
    write_whole(output, page(card))
    return report


def _free(output: Path, path: str | Path) -> Path:
    """The JSON beside the page. Raises CkptkitError where either cannot be written, or is there."""
    if output.suffix != ".md" or output.name in LOADED:
        raise UsageError(
            f"{output} cannot be a card", "name a file that ends in .md (--output); the JSON lies beside it"
        )
    digests = output.with_suffix(".json")
    replaceable_manifest(digests, True, path)
    if os.path.lexists(output):
        raise CkptkitError(f"{output} exists already", "move it away, or choose another --output")
    return digests


def _digests(subject: Subject) -> tuple[dict[str, TensorDigest], dict[str, str]]:
    """Of tensors, from what the checks have read, and of the files beside them; none unless all tensors were read."""
    if (found := subject.found(read_values)) is None or found.unreadable:
        return {}, {}
    specs, stats = subject.checkpoint.specs, stored_values(subject).stats
    tensors = {name: TensorDigest.known(spec, stats[name].digest.hex()) for name, spec in specs.items()}
    return tensors, described_files(subject.location, [subject.location.root / FOLDER])


def _versions() -> dict[str, str]:
    found = {"ckptkit": program_version(), "Python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _memory(*, started: bool) -> tuple[int, int]:
    """Bytes of this process and, where a witness was asked, of the largest that was started; Linux counts in KiB."""
    who = (resource.RUSAGE_SELF, *[resource.RUSAGE_CHILDREN] * started)
    own, *others = (resource.getrusage(one).ru_maxrss * 1024 for one in who)
    return own, max(others, default=0)


def _facts(card: Card) -> dict[str, Any]:
    own, started = card.memory
    return {
        "weights": card.weights,
        "versions": dict(card.versions),
        "machine": card.machine,
        "seconds": card.seconds,
        "memory": {"ckptkit": own, "largest process": started},
    }
