"""A witness that misbehaves as the word in its job says: `python -m support.confined_witness JOB`."""

import ast
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

_TELL = "CKPTKIT_TEST_TELL_PATH"


def main():
    if _TELL in os.environ:
        print(_path())
        return
    job = Path(sys.argv[1])
    asked = json.loads(job.read_text())
    getattr(sys.modules[__name__], asked["do"])(job.parent, asked)


def hang(folder, asked):
    (folder / "began").touch()
    time.sleep(600)


def eat(folder, asked):
    held = bytearray(os.urandom(1 << 20) * 300)
    hang(folder, held)


def tell(folder, asked):
    (folder / "variables").write_text(json.dumps(dict(os.environ)))


def path(folder, asked):
    tell = "import os, sys; print([os.getcwd(), *sys.path])"
    kinds = {"-c": ["-c", tell], "stdin": ["-"], "-m": ["-m", "support.confined_witness"], "file": [__file__]}
    found = {"own": [os.getcwd(), *sys.path]}
    for kind, words in kinds.items():
        text = tell if kind == "stdin" else ""
        command, variables = [sys.executable, *words], os.environ | {_TELL: "1"}
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, env=variables)
        found[kind] = ast.literal_eval(done.stdout)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found["spawn"] = pool.apply(_path)
    (folder / "path").write_text(json.dumps(found))


def _path():
    return [os.getcwd(), *sys.path]


def spawn(folder, asked):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / "child").write_text(str(child.pid))
    hang(folder, asked)


def meet(folder, asked):
    """Joins a process group as the witnesses do, and writes down on which addresses it listens."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=asked["rank"], world_size=2)
    mine = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:  # TCP_LISTEN
                raw = bytes.fromhex(fields[1].partition(":")[0])
                words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                found.append(socket.inet_ntop(family, words))
    (folder / f"listening-{asked['rank']}").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
