"""Runs verbs on inputs, each in a fork of a process that has imported all verbs, and watches what the fork does.

`python -m hostile.server` reads a line of JSON from stdin for each run, and writes one line to stdout that says how it
ended. A fork costs milliseconds where a new interpreter costs seconds. It may use 1 GiB more than the process had and
5 seconds of the processor; a minute without an end is a hang.
"""

import gc
import json
import os
import resource
import signal
import sys
from pathlib import Path

import torch
from click.testing import CliRunner

from ckptkit.app.cli import cli, main
from hostile.hook_calls import call

MAX_MEMORY, MAX_SECONDS, MAX_WAIT = 1 << 30, 10, 60
_MAX_FILE = 1 << 28
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# What starts another program, runs what a pickle names, or leaves the machine.
_FORBIDDEN = {
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn"),
    *("pickle.find_class", "socket.connect", "socket.bind", "code.__new__"),
}
# What changes files: how many of its arguments are paths, and which one is the directory they are relative to.
_CHANGES = {
    **dict.fromkeys(("os.remove", "os.rmdir"), (1, 1)),
    "os.mkdir": (1, 2),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), (2, None)),
    **dict.fromkeys(("os.chmod", "os.chown", "os.truncate", "os.utime", "os.setxattr"), (1, None)),
}


class Watch:
    """An audit hook that notes what a verb must not do in its directory `root`."""

    def __init__(self, root, words):
        self.seen: list[str] = []
        self._root = str(root)
        fixed = ("in/config.json", "in/.config.json.") if "--fix" in words else ()
        self._writable = tuple(f"{root / name}" for name in ("out", "tmp", *fixed))

    def __call__(self, event, arguments):
        if event in _FORBIDDEN:
            self.seen.append(f"{event} {arguments!r:.200}")
        elif event == "open" and arguments[2] & _WRITES and not isinstance(arguments[0], int):
            self._written(event, arguments[0])
        elif event == "open" and self._absolute(arguments[0]).startswith(f"{self._root}/outside"):
            self.seen.append(f"read {arguments[0]!r}")
        elif event in _CHANGES:
            count, folder = _CHANGES[event]
            at = self._root
            if folder is not None and arguments[folder] > 2:
                at = os.readlink(f"/proc/self/fd/{arguments[folder]}")
            for path in arguments[:count]:
                if not isinstance(path, int):
                    self._written(event, os.path.join(at, os.fsdecode(path)))

    def _written(self, event, path):
        if not self._absolute(path).startswith((*self._writable, "/dev/null", "/proc/self/fd/")):
            self.seen.append(f"{event} {path!r}")

    def _absolute(self, path):
        return os.path.join(self._root, os.fsdecode(path)) if isinstance(path, (str, bytes, os.PathLike)) else ""


def _child(words, root):
    """Runs one verb as the command line does. Does not return."""
    # In a fork torch makes its pool of threads anew at the first call; of threads that call at once some find none.
    torch.set_num_threads(1)
    os.chdir(root)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(root / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ |= {"TMPDIR": str(root / "tmp"), "XDG_CACHE_HOME": str(root / "tmp"), "COLUMNS": "1000"}
    os.umask(0o022)
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE, _MAX_FILE))
    signal.alarm(MAX_WAIT)
    watch = Watch(root, words)
    sys.addaudithook(watch)
    sys.argv = ["ckptkit", *words]
    code = 99
    try:
        code = call(words[1:]) if words[0] == "hook" else main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 98
    finally:
        seen = list(watch.seen)
        sys.stdout.flush()
        sys.stderr.flush()
        (root / "seen").write_text(json.dumps(seen))
        os._exit(code)


def _run(words, root):
    child = os.fork()
    if not child:
        _child(words, root)
    _, status, used = os.wait4(child, 0)
    said = "".join((root / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    seen = json.loads((root / "seen").read_text()) if (root / "seen").exists() else ["not ended by itself"]
    for name in ("stdout", "stderr", "seen"):
        (root / name).unlink(missing_ok=True)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "said": said,
        "seen": seen,
        "seconds": used.ru_utime + used.ru_stime,
    }


def serve():
    requests = (json.loads(line) for line in sys.stdin)
    for words in next(requests):
        CliRunner().invoke(cli, words, standalone_mode=False)
    gc.collect()
    gc.freeze()
    answers, sys.stdout = sys.stdout, sys.stderr
    for words, root in requests:
        answers.write(json.dumps(_run(words, Path(root))) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    serve()
