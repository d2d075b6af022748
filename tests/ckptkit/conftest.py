"""The command line in this process; an S3 server, started once, with a new bucket for each test and a release.

What imports boto3 or transformers is imported where it is used: `make smoke` has neither.
"""

import subprocess
import sys

import pytest

from ckptkit.app.cli import main


@pytest.fixture(scope="session")
def s3_address(tmp_path_factory):
    from support.remote_servers import s3_server

    with s3_server(tmp_path_factory.mktemp("s3") / "log") as address:
        yield address


@pytest.fixture
def bucket(s3_address, monkeypatch):
    """A new bucket, with the environment set so that s3:// means this server."""
    from support.remote_servers import Bucket, use_s3

    with use_s3(monkeypatch, s3_address):
        yield Bucket.new(s3_address)


@pytest.fixture(scope="session")
def small_release(tmp_path_factory):
    from support import models

    root = tmp_path_factory.mktemp("small") / "qwen"
    models.save("qwen2-tied", root, shard_size="2MB")
    return root


@pytest.fixture
def stored(small_release, bucket):
    bucket.put_directory(small_release, "models/qwen")
    return bucket.url("models/qwen")


@pytest.fixture
def ckptkit(monkeypatch, capfd):
    """`ckptkit(*arguments)`: how the command ends with these arguments, run in this process."""

    def command(*arguments):
        words = ["ckptkit", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", words)
        capfd.readouterr()  # what was printed while checkpoints were made
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(words, ended.value.code, *capfd.readouterr())

    return command
