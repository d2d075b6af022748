"""URLs with credentials: refused by every verb before a library sees them, and shown without what is secret."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from ckptkit.app.cli import cli
from ckptkit.core.errors import UsageError
from ckptkit.storage.url import Store, path_or_url

URLS = {
    "s3://KEY:TOP@host/c": "s3://***@host/c",
    "s3://KEY:T/O P'@host/c": "s3://***@host/c",
    "S3A://KEY:TOP@host/c": "S3A://***@host/c",
    "s3://b/c?X-Amz-Signature=TOP": "s3://b/c?***",
    "hf://user:TOP@org/name": "hf://***@org/name",
    "hf://hf_TOPTOPTOPTOPTOPTOP@org/name": "hf://***@org/name",
    "gs://TOP@bucket/c": "gs://***@bucket/c",
    "az://account:TOP@container/c": "az://***@container/c",
    "abfs://c:TOP@account.dfs.core.windows.net/c": "abfs://***@account.dfs.core.windows.net/c",
    "https://a.blob.core.windows.net/c?sv=1&sig=TOP": "https://a.blob.core.windows.net/c?***",
    "http://user:TOP@h/c": "http://***@h/c",
    "file://user:TOP@h/c": "file://***@h/c",
    "filecache::s3://KEY:TOP@host/c": "filecache::s3://***@host/c",
    "s3:/KEY:TOP@host/c": "s3:/***@host/c",
}
# Every verb parses its words in one place.
VERBS = (
    "inspect U",
    "convert in U --merge ad",
    "convert in out --hf=U",
    "quantize in out --like U",
    "verify in --report U/x.json",
    "diff in U",
    "preflight --load U -- --lr 1",
    "explain U",
    "U",
)


@pytest.mark.parametrize(("verb", "url"), [*zip(VERBS, URLS, strict=False)])
def test_every_verb_refuses_a_url_with_credentials(verb, url):
    ran = CliRunner().invoke(cli, [word.replace("U", url) for word in verb.split(" ")])
    assert isinstance(ran.exception, UsageError), ran.output
    assert URLS[url] in str(ran.exception)
    assert "TOP" not in f"{ran.exception}{ran.output}"


def test_no_library_is_given_credentials():
    for url, shown in URLS.items():
        for use in (path_or_url, Store):
            with pytest.raises(UsageError) as error:
                use(url)
            assert str(error.value).startswith(shown)
            assert "TOP" not in str(error.value)


def test_an_at_that_hides_nothing_is_read():
    for url in (
        *("s3://bucket/a@b", "s3://bucket/a?versionId=1", "memory://a/b", "hf://Qwen/Qwen3@main"),
        *("s3://arn:aws:s3:us-west-2:123456789012:accesspoint/a/b@c", "hf://datasets/a/b@refs/pr/1"),
        "abfs://container@account.dfs.core.windows.net/c",
    ):
        assert path_or_url(url) == url
        assert Store(url).at("x") == f"{url}/x"


def test_words_of_a_launch_may_have_credentials(tmp_path):
    """They are for other programs; what a report quotes of them has none."""
    for url in ("https://user:TOP@tracker/x", "s3://KEY:TOP@host", "az://c/x?sig=TOP"):
        words = ["--json", "--", "--hf-checkpoint", url, "--load", url, "--wandb-host", url]
        ran = CliRunner().invoke(cli, ["preflight", *words])
        assert json.loads(ran.output)["findings"], ran.output
        assert "TOP" not in ran.output


def test_a_traceback_has_none():
    words = ["-m", "ckptkit", "--debug", "inspect", "s3://KEY:TOP@host/c"]
    ran = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert (ran.returncode, "Traceback" in ran.stderr, "TOP" in ran.stderr + ran.stdout) == (2, True, False)
