"""A server with one model repository that answers what huggingface_hub asks to list and read it; it takes no writes."""

import hashlib
import json
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from support.remote_servers import SilentHandler, serving

SHA = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def fake_hub(repository, root, asked, sent=None):
    """The address of a hub whose `repository` (`org/name`) holds the files of `root`.

    Appends method and path of each request to `asked`. `sent`: what is sent of a file in place of what is published.
    """
    with serving(_handler(repository, root, asked, sent or {})) as address:
        yield address


def download(repository, root, sent=None, **where):
    """Where huggingface_hub itself puts the files of `root`, to a `cache_dir` or a `local_dir`; without a network."""
    from huggingface_hub import hf_hub_download

    files = [str(path.relative_to(root)) for path in sorted(root.rglob("*")) if path.is_file()]
    with fake_hub(repository, root, [], sent) as address:
        paths = [Path(hf_hub_download(repository, file, endpoint=address, **where)) for file in files]
    return paths[0].parent


def _handler(repository, root, asked, sent):
    api, files = f"/api/models/{repository}", f"/{repository}/resolve/"

    class Hub(SilentHandler):
        def do_GET(self):  # noqa: N802
            path = urlsplit(self.path).path
            asked.append(f"{self.command} {path}")
            if path in (api, f"{api}/revision/main"):
                self.answer_json({"id": repository, "sha": SHA, "siblings": []})
            elif path.startswith(f"{api}/tree/main"):
                self.answer_json(
                    [_entry(root, one) for one in sorted(root.rglob("*"))] if path == f"{api}/tree/main" else []
                )
            elif path == f"{api}/paths-info/main":
                content = self.rfile.read(int(self.headers["Content-Length"]))
                wanted = (
                    json.loads(content)["paths"]
                    if "json" in self.headers["Content-Type"]
                    else parse_qs(content.decode())["paths"]
                )
                self.answer_json([_entry(root, root / name) for name in wanted if name and (root / name).exists()])
            elif path.startswith(files) and (root / path.removeprefix(files).partition("/")[2]).is_file():
                self.answer_file(path.removeprefix(files).partition("/")[2])
            else:
                self.answer(404, b"", X_Error_Code="EntryNotFound" if path.startswith(files) else "RepoNotFound")

        do_HEAD = do_POST = do_GET  # noqa: N815

        def answer_file(self, name):
            content, tag = sent.get(name, (root / name).read_bytes()), etag(root / name)
            status, headers = 200, {"ETag": f'"{tag}"', "X_Repo_Commit": SHA, "Accept_Ranges": "bytes"}
            if (asked_for := self.headers.get("Range")) is not None:
                first, last = asked_for.removeprefix("bytes=").split("-")
                begin, end = int(first), min(int(last), len(content) - 1) if last else len(content) - 1
                headers["Content_Range"] = f"bytes {begin}-{end}/{len(content)}"
                status, content = 206, content[begin : end + 1]
            self.answer(status, content, **headers)

        def answer_json(self, content):
            self.answer(200, json.dumps(content).encode(), Content_Type="application/json")

    return Hub


def etag(path):
    """As the hub has it: of weights, which it stores apart, the SHA-256; of small files what git calls the blob."""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _entry(root, path):
    name = str(path.relative_to(root))
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": SHA}
    return {
        "type": "file",
        "path": name,
        "oid": hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest(),
        "size": path.stat().st_size,
    }
