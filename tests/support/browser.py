"""A real headless Chromium, driven over a pipe (https://chromedevtools.github.io/devtools-protocol/)."""

import json
import os
import shutil
import subprocess
import time
from contextlib import contextmanager

NAMES = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE_S = 60


def found():
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. `problems` are what the console and the network complained of."""

    def __init__(self, reader, writer):
        self._reader, self._writer, self._rest, self._last, self._session = reader, writer, b"", 0, ""
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)

    def call(self, method, **parameters):
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        os.write(
            self._writer, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self):
        while b"\0" not in self._rest:
            chunk = os.read(self._reader, 1 << 16)
            assert chunk, "the browser has gone"
            self._rest += chunk
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        if message.get("method") in (
            "Log.entryAdded",
            "Runtime.exceptionThrown",
            "Runtime.consoleAPICalled",
            "Network.loadingFailed",
        ):
            self.problems.append(json.dumps(message["params"]))
        return message

    def open(self, path, fragment=""):
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.as_uri() + fragment)
        ended = time.monotonic() + _PATIENCE_S
        while self.run("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < ended, "the page did not load"
            time.sleep(0.05)

    def run(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key, code):
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def width(self, pixels):
        self.call("Emulation.setDeviceMetricsOverride", width=pixels, height=900, deviceScaleFactor=1, mobile=False)

    def scheme(self, name):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])


@contextmanager
def page(profile):
    (read_here, write_there), (read_there, write_here) = os.pipe(), os.pipe()

    def arrange():
        # Copies first: either number may be taken by the other.
        one, other = os.dup(read_there), os.dup(write_there)
        os.dup2(one, 3)
        os.dup2(other, 4)

    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses to be started by root
    flags = ["--headless", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    command = [str(found()), *sandbox, *flags]
    browser = subprocess.Popen(
        command, preexec_fn=arrange, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(read_there)
    os.close(write_there)
    try:
        yield Page(read_here, write_here)
    finally:
        browser.kill()
        browser.wait()
        os.close(read_here)
        os.close(write_here)
