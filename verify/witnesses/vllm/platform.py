"""The device for which vLLM chooses kernels: the GPU here; without one an emulated H100, or the CPU.

Without a GPU vLLM of the CUDA wheel finds no platform. With another subclass of its CUDA platform it makes the choices
of an H100 (methods of quantization, layouts of experts) with tensors on the CPU. `VLLM_TARGET_DEVICE=cpu` selects its
CPU platform instead, which builds fewer schemes and accepts sizes that no kernel of a GPU accepts.

Its compiled operators are linked against `libcuda.so.1`. They need a handful of its functions to exist, and call none
of them while a model is built and loaded. Without NVIDIA's driver, a library of that name is written without a compiler
(ELF, System V ABI), with functions that all return CUDA_ERROR_NO_DEVICE.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ckptkit.verify.witnesses.process.h100 import CAPABILITY, PROPERTIES

_COMMUNICATOR = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
_DRIVER = "libcuda.so.1"
_FUNCTIONS = ("cuDriverGetVersion", "cuGetProcAddress_v2", "cuInit", "cuPointerGetAttribute", "cuTensorMapEncodeTiled")
_PAGE = 0x10000  # of the largest pages that Linux has on these machines
# Machine number, and the code of `return 100`.
_MACHINES = {"x86_64": (62, bytes.fromhex("b864000000c3")), "aarch64": (183, bytes.fromhex("800c8052c0035fd6"))}


def emulated_device() -> str | None:
    """The device for which vLLM chooses with tensors on the CPU, or None if it is the device of the tensors."""
    from vllm.platforms import current_platform

    return "an H100" if current_platform.is_cuda() and current_platform.device_type == "cpu" else None


def choose_platform(scratch: Path) -> None:
    """Sets vLLM's platform if it finds none. Must run before any other module of vLLM is imported."""
    if torch.cuda.is_available():
        return
    import vllm.platforms as platforms

    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        from vllm.platforms.cpu import CpuPlatform

        platforms._current_platform = CpuPlatform()
        return
    _load_driver(scratch)
    _answer_as_h100()
    platforms._current_platform = _h100()
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    # Latent attention needs some kernel for prefill, on which no weight depends.
    mla_attention.get_mla_prefill_backend = lambda _: MLAPrefillBackendEnum.FLASH_ATTN.get_class()


class _Idle:
    """Accepts every call and does nothing: a stream or an event of a missing GPU."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


def _answer_as_h100() -> None:
    """Patches torch functions that vLLM's layers call directly instead of the platform."""
    answers = {
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_name": lambda *_: PROPERTIES.name,
        "get_device_properties": lambda *_: PROPERTIES,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "Stream": _Idle,  # a shared expert gets its own one
        "Event": _Idle,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver as triton

    # Kernels of linear attention read it while they are imported.
    target = GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], PROPERTIES.warp_size)
    triton.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))


def _h100() -> Any:
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class AbsentH100(NonNvmlCudaPlatform):  # type: ignore[misc]
        device_type = "cpu"
        dispatch_key = "CPU"
        dist_backend = "gloo"
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(*CAPABILITY))
        set_device = classmethod(lambda cls, device: None)
        get_device_communicator_cls = classmethod(lambda cls: _COMMUNICATOR)
        is_pin_memory_available = classmethod(lambda cls: False)
        num_compute_units = classmethod(lambda cls, device_id=0: PROPERTIES.multi_processor_count)

    return AbsentH100()


def _load_driver(scratch: Path) -> None:
    """Loads the driver or a substitute, written into `scratch`. Raises OSError on an unsupported architecture."""
    try:
        ctypes.CDLL(_DRIVER, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        if platform.machine() not in _MACHINES:
            raise
        path = scratch / f"libcuda-{os.getpid()}.so.1"  # ranks share `scratch`, and must not overwrite a loaded library
        path.write_bytes(library(_DRIVER, _FUNCTIONS, *_MACHINES[platform.machine()]))
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def library(name: str, functions: Sequence[str], machine: int, code: bytes) -> bytes:
    """A shared library with functions that all run `code`: one page of code, and one with the dynamic section."""
    strings = b"\0" + b"".join(one.encode() + b"\0" for one in (name, *functions))
    offsets = {one: strings.index(b"\0" + one.encode() + b"\0") + 1 for one in (name, *functions)}
    count = len(functions) + 1
    # Of the hash table: one bucket, in which each symbol leads to the next.
    table = struct.pack(f"<{3 + count}I", 1, count, 1, 0, *range(2, count), 0)
    at_code = 64 + 3 * 56
    at_symbols = -(-(at_code + len(code)) // 8) * 8
    at_table = at_symbols + 24 * count
    at_strings = at_table + len(table)
    symbols = bytes(24) + b"".join(
        struct.pack("<IBBHQQ", offsets[one], 0x12, 0, 1, at_code, len(code)) for one in functions
    )
    dynamic = [(4, at_table), (5, at_strings), (6, at_symbols), (10, len(strings)), (11, 24), (14, offsets[name])]
    entries = b"".join(struct.pack("<QQ", *one) for one in [*dynamic, (0, 0)])
    text = code.ljust(at_symbols - at_code, b"\0") + symbols + table + strings
    end = at_code + len(text)
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 3, machine, 1, 0, 64, 0, 0, 64, 56, 3, 64, 0, 0)
    segments = [(1, 5, 0, end), (1, 6, _PAGE, len(entries)), (2, 6, _PAGE, len(entries))]
    heads = b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, start, start, start, size, size, 8 if kind == 2 else _PAGE)
        for kind, flags, start, size in segments
    )
    return (header + heads + text).ljust(_PAGE, b"\0") + entries
