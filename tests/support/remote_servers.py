"""Servers that tests read from and write to: moto's S3 in a process of its own, and proxies that break it."""

import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3
import s3fs

ANSWER_S = 60
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


@dataclass(frozen=True)
class Bucket:
    """A bucket, seen through boto3: what ckptkit uses to reach it is another library."""

    name: str
    client: Any

    @classmethod
    def new(cls, address):
        client = boto3.client("s3", endpoint_url=address)
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        client.create_bucket(Bucket=name)
        return cls(name, client)

    def url(self, prefix):
        return f"s3://{self.name}/{prefix}"

    def put(self, key, content):
        self.client.put_object(Bucket=self.name, Key=key, Body=content)

    def put_directory(self, root, prefix):
        for path in sorted(root.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(root)}", path.read_bytes())

    def get(self, key):
        return self.client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def delete(self, key):
        self.client.delete_object(Bucket=self.name, Key=key)

    def listed(self):
        return sorted(entry["Key"] for entry in self.client.list_objects_v2(Bucket=self.name).get("Contents", []))


@contextmanager
def use_s3(monkeypatch, address):
    """Meanwhile s3:// means the server at this address, and nothing of this machine's own settings is used."""
    settings = {"AWS_ENDPOINT_URL": address, "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    nowhere = {"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "AWS_MAX_ATTEMPTS": "1"}
    for name, value in {**settings, **nowhere, **KEYS}.items():
        monkeypatch.setenv(name, value)
    # Which servers they talk to is settled when file systems are made.
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def s3_server(log):
    port = free_port()
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=output, stderr=output
        )
    try:
        wait_for(port, server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def wait_for(port, server, log):
    """Returns when the server answers. Raises RuntimeError with its log when it does not."""
    end = time.monotonic() + ANSWER_S
    while time.monotonic() < end and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"no S3 server on port {port}: {log.read_text()}")


class SilentHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def answer(self, status, content, **headers):
        """Sends an answer; `_` in the name of a header is `-`."""
        self.send_response(status)
        for name, value in {**headers, "Content_Length": str(len(content))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serving(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str | None
    bytes: int


def breaking(target, seen, breaks=lambda request: False):
    """A handler that hands every request on to `target` and notes it in `seen`.

    It breaks off in the middle of the answer when `breaks(request)`.
    """
    host = target.removeprefix("http://")

    class Proxy(SilentHandler):
        def hand_on(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            connection = HTTPConnection(host)
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in {"transfer-encoding", "connection", "content-length", "date", "server"}:
                    self.send_header(name, value)
            self.send_header(
                "Content-Length", answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
            )
            self.end_headers()
            seen.append(Request(self.command, self.path, self.headers.get("Range"), len(content)))
            if breaks(seen[-1]):
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
            else:
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = hand_on  # noqa: N815

    return Proxy


def refusing(status, code, only="", target="", about=""):
    """A handler that answers every request with S3's error of this status and code.

    With `only` or `about`, requests of another method, or without it in their path, go on to `target`.
    """

    class Refusal(breaking(target, [])):
        def do_GET(self):  # noqa: N802
            if (only and self.command != only) or about not in self.path:
                self.hand_on()
                return
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            content = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            self.answer(status, content, Content_Type="application/xml")

        do_PUT = do_POST = do_HEAD = do_DELETE = do_GET  # noqa: N815

    return Refusal
