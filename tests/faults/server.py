"""Runs `ckptkit` in forks of a process that has imported everything: `python -m faults.server SHIM`.

Reads a JSON `Request` a line and answers each with a line: its exit code and how often its fault was met. The shim
must be preloaded. The process itself may neither compute nor start a thread, since it forks.
"""

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import sys
import traceback

from ckptkit.app.cli import main as ckptkit

_IMPORTS = (
    *("torch", "torch.distributed.checkpoint", "safetensors.torch", "compressed_tensors", "transformers"),
    *("ckptkit.app.api", "ckptkit.app.conversion", "ckptkit.app.inspection", "numba"),
    *("ckptkit.quant.ignore.lint", "ckptkit.quant.kernels.cpu", "ckptkit.quant.planner", "ckptkit.converters.planner"),
    *("ckptkit.app.cli.conversion", "ckptkit.app.cli.inspection"),
    *(
        "ckptkit.app.cli.verification",
        "ckptkit.verify.run",
        "ckptkit.verify.launch.preflight",
        "ckptkit.verify.diff.diff",
        "ckptkit.verify.diff.text",
    ),
    *(
        "ckptkit.verify.reports",
        "ckptkit.verify.reports.render",
        "ckptkit.verify.reports.html",
        "ckptkit.verify.triage.triage",
    ),
)
_NOBODY = 65534
_PR_SET_KEEPCAPS, _CAP_DAC_READ_SEARCH = 8, 2


def main():
    shim = ctypes.CDLL(sys.argv[1])
    shim.fault_clock.argtypes = [ctypes.c_longlong]
    for name in _IMPORTS:
        importlib.import_module(name)
    gc.freeze()
    replies = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        shim.fault_reset()
        child = os.fork()
        if not child:
            os.close(replies.fileno())
            os._exit(_run(request, shim))
        status = os.waitpid(child, 0)[1]
        replies.write(json.dumps([os.waitstatus_to_exitcode(status), shim.fault_hits()]) + "\n")
        replies.flush()


def _run(request, shim):
    """One run as Python would do it. Returns its exit code, 120 where its output cannot be flushed, as Python's."""
    try:
        _set_up(request, shim)
        try:
            ckptkit()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
    except BaseException:  # noqa: BLE001 - nothing may get out of a fork
        traceback.print_exc()
        code = 1
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            code = 120
    return code


def _set_up(request, shim):
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(request["stderr"], os.O_WRONLY | os.O_CREAT, 0o666), 2)
    _open_stdout(request["stdout"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    sys.argv = ["ckptkit", *request["words"]]
    if request["nobody"] and os.geteuid() == 0:
        _become_nobody()
    if request["files"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (request["files"], request["files"]))
    if fault := request["fault"]:
        call, pattern, action, value, first, times = fault
        shim.fault_arm(call.encode(), pattern.encode(), action.encode(), value, first, times)
    shim.fault_clock(request["clock_s"])


def _become_nobody():
    """A user who may write nowhere, and may still read the installation, which may lie in root's home (capset(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, of the lower and of the upper capabilities
    libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)
    libc.capget(header, sets)
    reading = sets[1] & 1 << _CAP_DAC_READ_SEARCH
    if libc.capset(header, (ctypes.c_uint32 * 6)(reading, reading)):
        raise OSError(ctypes.get_errno(), "capset")


def _open_stdout(kind):
    """A file, or "closed", or "broken", a pipe that nobody reads."""
    if kind == "closed":
        os.close(1)
        sys.stdout = None  # as Python has it then
        return
    if kind == "broken":
        reader, writer = os.pipe()
        os.close(reader)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python has it
    else:
        writer = os.open(kind, os.O_WRONLY | os.O_CREAT, 0o666)
    os.dup2(writer, 1)
    os.close(writer)


if __name__ == "__main__":
    main()
