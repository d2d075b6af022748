"""lab/failures.md is what verify prints now, and fits the terminal that it speaks of."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_page_of_failures_is_what_verify_prints():
    made = runpy.run_path(str(ROOT / "docs/examples/failures.py"), run_name="failures")["page"]()
    text = (ROOT / "lab/failures.md").read_text(encoding="utf-8")
    assert made == text
    captures = re.findall(r"```console\n\$ (.+?)\n(.+?)\n```", text, re.DOTALL)
    assert len(captures) == 6
    for command, printed in captures:
        lines = printed.split("\n")
        assert command.startswith("ckptkit verify broken")
        assert len(lines) <= 24
        assert all(len(line) <= 80 and line == line.rstrip() for line in lines)
        assert re.match(r"error +CK\d{3}  |CK\d{3}-1 error: ", lines[lines.index("") + 1])
        assert lines[-1].startswith("FAILED with ")
