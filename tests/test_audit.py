"""`make audit`: the exit code is pip-audit's own, and a service that cannot be reached is not a clean result."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / ".ci/audit"
UNREACHED = "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='api.osv.dev', port=443)"
CLEAR = "Nothing was audited: the advisory service (https://api.osv.dev) cannot be reached from here."


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "said"),
    [
        (0, "", "No known vulnerabilities found", "No known vulnerabilities found\n"),
        (1, "idna 3.20 PYSEC-1 4.0", "Found 1 known vulnerability", "Found 1 known vulnerability\n"),
        (1, "", f"Traceback (most recent call last):\n{UNREACHED}", f"{UNREACHED}\n{CLEAR}\n"),
        (2, "", "pip-audit: error: unrecognized arguments", "pip-audit: error: unrecognized arguments\n"),
    ],
)
def test_audit_exits_as_pip_audit_and_says_whether_anything_was_asked(code, stdout, stderr, said, tmp_path):
    (tmp_path / "stdout").write_text(stdout)
    (tmp_path / "stderr").write_text(f"{stderr}\n")
    fake = tmp_path / "pip-audit"
    lines = (f'echo "$@" >"{tmp_path}/arguments"', f'cat "{tmp_path}/stdout"', f'cat "{tmp_path}/stderr" >&2')
    fake.write_text("\n".join(["#!/bin/sh", *lines, f"exit {code}\n"]))
    fake.chmod(0o755)
    done = subprocess.run([SCRIPT, fake], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, stdout, said)
    arguments = (tmp_path / "arguments").read_text().split()
    assert {"osv", "--strict", "constraints.txt"} <= set(arguments)
