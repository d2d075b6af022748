"""Builds the wheel and the sdist of the last commit into a directory: the same bytes from every clone of it.

The tree is that of `git archive`, so nothing untracked gets in; times are those of the commit, or SOURCE_DATE_EPOCH.
The bytes are the same for the same setuptools (constraints.txt pins it) and zlib. Nothing is downloaded.
"""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import build_meta


def main(out: Path) -> None:
    """Writes both files into `out`, in place of ones of the same name, and prints their paths."""
    root = Path(__file__).resolve().parent.parent
    if _git(root, "status", "--porcelain", "--untracked-files=no"):
        sys.exit(
            "error: there are changes that are not committed\n  next: commit them; what is built is the last commit"
        )
    epoch = int(os.environ.setdefault("SOURCE_DATE_EPOCH", _git(root, "log", "-1", "--format=%ct").decode().strip()))
    os.umask(0o022)
    out.mkdir(parents=True, exist_ok=True)
    out = out.absolute()
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(_git(root, "archive", "HEAD"))) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 has it
            archive.extractall(folder)  # noqa: S202 - filtered, as far as Python can
        os.chdir(folder)
        with redirect_stdout(io.StringIO()):  # setuptools prints every file
            sdist = out / build_meta.build_sdist(str(out))
            wheel = out / build_meta.build_wheel(str(out))
        os.chdir(root)
    _normalize(sdist, epoch)
    print(sdist, wheel, sep="\n")


def _git(root: Path, *words: str) -> bytes:
    command = ["git", *words]
    return subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE).stdout


def _normalize(sdist: Path, epoch: int) -> None:
    """Writes an sdist again in the order of names, without owners and times of its own: setuptools leaves them in."""
    with tarfile.open(sdist) as archive:
        members = [
            (member, archive.extractfile(member).read() if member.isfile() else b"")  # type: ignore[union-attr]
            for member in sorted(archive.getmembers(), key=lambda one: one.name)
        ]
    with (
        sdist.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for member, content in members:
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime, member.pax_headers = epoch, {}
            archive.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist"))
