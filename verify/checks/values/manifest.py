"""CK120: checks a checkpoint against a manifest, without a source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptkit.core.specs import TensorSpec
from ckptkit.transfer.manifest import Manifest, file_digest, loaded_files, read_manifest
from verify.check import Tally, check, without
from verify.checks.headers.files import home_of
from verify.evidence.reading import stored_values
from verify.evidence.subject import Subject
from verify.issue import Issue


@check(
    "CK120",
    "tensors and side files are those of the manifest",
    stage="headers",
    rationale="A copy or a download can lose or change bytes, and a checkpoint can be edited. The manifest says what "
    "it held when it was made.",
    fix="Copy or download the named files again. If the change was meant, make a new manifest with `ckptkit manifest`.",
    unless=without(lambda subject: subject.options.manifest, "no --manifest was given"),
)
def same_as_manifest(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every tensor of the manifest with its dtype, shape and bytes, every side file, and no other that loaders read.

    Raises CkptkitError where the manifest cannot be read.
    """
    manifest = read_manifest(subject.options.manifest or Path())
    yield from _tensors(subject, manifest, tally)
    root = subject.location.root
    for name, digest in manifest.files.items():
        there = (root / name).is_file()
        if not there or file_digest(root / name) != digest:
            yield Issue("the file of the manifest", "its bytes differ" if there else "missing", file=root / name)
    for name in sorted(loaded_files(subject.location) - manifest.files.keys()):
        hint = "remove it, or make a new manifest if it belongs to the checkpoint"
        actual = "the manifest has no file of this name, and loaders read it"
        yield Issue("only files of the manifest that loaders read", actual, hint, file=root / name)


def _tensors(subject: Subject, manifest: Manifest, tally: Tally) -> Iterator[Issue]:
    specs, values = subject.checkpoint.specs, stored_values(subject)
    for name in [*manifest.tensors, *(name for name in specs if name not in manifest.tensors)]:
        actual = "missing" if name not in specs else "the manifest has no tensor of this name"
        if name in specs and name in manifest.tensors:
            tally.compared(specs[name].nbytes)
            if name not in values.stats:
                continue  # CK201 says that it cannot be read
            actual = _difference(manifest, specs[name], values.stats[name].digest) or ""
        if actual:
            file = home_of(subject, name) if name in specs else ""
            yield Issue("the tensor of the manifest", actual, names=[name], file=file)


def _difference(manifest: Manifest, spec: TensorSpec, digest: bytes) -> str | None:
    promised = manifest.tensors[spec.name]
    if (promised.dtype, promised.shape) != (spec.dtype, spec.shape):
        return f"{list(spec.shape)} {spec.dtype}, in the manifest {list(promised.shape)} {promised.dtype}"
    return None if promised.blake3 == digest.hex() else "its bytes differ"
