"""CK120 and CK124: files against earlier digests: those of a manifest, and those of the hub's client."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from ckptkit.core.progress import progress
from ckptkit.core.specs import summarize
from ckptkit.storage.file_hash import FileHash
from ckptkit.transfer.manifest import file_digest, loaded_files, read_manifest
from ckptkit.verify.checks.headers.files import file_of_tensor
from ckptkit.verify.core.check import CannotCheck, CheckResult, Issue, Subject, check, only_if
from ckptkit.verify.evidence.reading import downloads, file_hashes, read_values, stored_values

DOWNLOAD = "download"  # the fact about the origin of the files
_SLACK_S = 1  # as in the client, since times of files are not exact
_MIRROR = "; if a mirror was used (HF_ENDPOINT), its names of files may not be hashes: every file differs"
_has_manifest = only_if(lambda subject: subject.options.manifest, "--manifest was not given")


@check("CK120", stage="headers", applies_to=_has_manifest)
def same_as_manifest(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every tensor and side file of the manifest, and no other that loaders read. Raises CkptkitError if unreadable."""
    manifest = read_manifest(subject.options.manifest or Path())
    root, specs, values = subject.location.root, subject.checkpoint.specs, stored_values(subject)
    for name in [*manifest.tensors, *(name for name in specs if name not in manifest.tensors)]:
        actual = "missing" if name not in specs else "the manifest has no such tensor"
        if name in specs and name in manifest.tensors:
            result.compared(nbytes=specs[name].nbytes)
            if name not in values.stats:
                continue  # CK201 reports that it cannot be read
            spec, promised = specs[name], manifest.tensors[name]
            actual = "" if promised.blake3 == values.stats[name].digest.hex() else "its bytes differ"
            if (promised.dtype, promised.shape) != (spec.dtype, spec.shape):
                actual = f"{list(spec.shape)} {spec.dtype}, but {list(promised.shape)} {promised.dtype} in the manifest"
        if actual:
            file = file_of_tensor(subject, name) if name in specs else ""
            yield Issue("the tensor as in the manifest", actual, names=[name], file=file)
    for name, digest in manifest.files.items():
        exists = (root / name).is_file()
        if not exists or file_digest(root / name) != digest:
            yield Issue("the file as in the manifest", "its bytes differ" if exists else "missing", file=root / name)
    for name in sorted(loaded_files(subject.location) - manifest.files.keys()):
        hint = "remove the file, or make a new manifest if the file belongs to the checkpoint"
        actual = "loaders read this file, but the manifest does not list it"
        yield Issue("no other files than those of the manifest", actual, hint, file=root / name)


@check("CK124", applies_to=only_if(downloads, "the directory has no download record of the model hub's client"))
def as_published(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """SHA-256 (git's SHA-1 for small files) of the files that loaders open; a warning for files changed later."""
    read_values(subject)  # also hashes the weights
    records, hashes = downloads(subject), file_hashes(subject)
    compared = _compare(hashes)
    if not compared:
        raise CannotCheck("not run because no tensor can be read", "CK201")
    for name in compared:
        result.compared(nbytes=hashes[name].size)
    differ = [name for name, is_same in compared.items() if not is_same]
    changed = [name for name in differ if (subject.path / name).stat().st_mtime - _SLACK_S > records[name].time]
    mirror = _MIRROR if len(compared) == len(differ) > 1 else ""
    for name in (name for name in differ if name not in changed):
        record, shard = records[name], subject.hf_files.shards.get(name)
        kind = "SHA-256" if len(record.digest) == 64 else "git's SHA-1"
        place = "the name of its blob" if record.record.name == record.digest else f"as in {record.record.name}"
        expected, hint = f"{kind} {record.digest}, {place}", f"download the file again: `{record.fetch}`{mirror}"
        names = None if shard is None else shard.specs
        yield Issue(expected, f"{kind} {hashes[name].actual}", hint, names=names, file=name, as_one=True)
    if changed:  # one warning for all files that are newer than their records
        when = _time((subject.path / changed[0]).stat().st_mtime), _time(records[changed[0]].time)
        actual = f"{summarize(changed)} was changed at {when[0]}, after the download at {when[1]}"
        fetch = f"`{records[changed[0]].fetch}`{' and so on' if changed[1:] else ''}"
        hint = f"download again if the change was not intended: {fetch}"
        yield Issue("the bytes that were downloaded", actual, hint, severity="warning", count=len(changed))
    origins = ", ".join(dict.fromkeys(records[name].origin for name in compared))
    fact = f"{origins}: {len(compared) - len(differ)} of {len(compared)} files have the bytes that were published"
    unknown = [file for file in subject.hf_files.loader_files if file not in records]
    result.facts[DOWNLOAD] = [fact + (f"; no record of {summarize(unknown)}" if unknown else "")]


def _compare(hashes: Mapping[str, FileHash]) -> dict[str, bool]:
    """Whether each file has the hash of its record, without files that cannot be read, which CK201 reports."""

    def finish(one: FileHash) -> bool | None:
        with suppress(OSError):
            return one.finish()
        return None

    unread = {name: one.unread for name, one in hashes.items()}
    found = {}
    with progress("hashing files", sum(unread.values())) as advance, ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, is_same in zip(hashes, pool.map(finish, hashes.values()), strict=True):
            advance(unread[name])
            if is_same is not None:
                found[name] = is_same
    return found


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds")
