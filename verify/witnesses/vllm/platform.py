"""Which device vLLM chooses for: the GPU here; without one an H100 that is not there, or the CPU.

Without a GPU vLLM of the CUDA wheel finds no platform. As another subclass of its CUDA platform it makes the choices of
an H100 (methods of quantization, layouts of experts) with tensors on the CPU. `VLLM_TARGET_DEVICE=cpu` asks for its
CPU platform instead, which builds fewer schemes and takes sizes that no kernel of a GPU takes.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from verify.witnesses.vllm import driver

_CAPABILITY = (9, 0)
_NAME = "NVIDIA H100 80GB HBM3"
_MEMORY = 80 << 30
_MULTIPROCESSORS = 132
_PROPERTIES = SimpleNamespace(
    major=_CAPABILITY[0],
    minor=_CAPABILITY[1],
    name=_NAME,
    total_memory=_MEMORY,
    multi_processor_count=_MULTIPROCESSORS,
    shared_memory_per_block_optin=227 << 10,
    warp_size=32,
    L2_cache_size=50 << 20,
)


def chosen_for() -> str | None:
    """The device whose choices vLLM makes with tensors on the CPU; None where it is the device that they are on."""
    from vllm.platforms import current_platform

    return "an H100" if current_platform.is_cuda() and current_platform.device_type == "cpu" else None


def choose(scratch: Path) -> None:
    """Gives vLLM its platform where it finds none. Comes before anything else of vLLM is imported."""
    if torch.cuda.is_available():
        return
    import vllm.platforms as platforms

    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        from vllm.platforms.cpu import CpuPlatform

        platforms._current_platform = CpuPlatform()
        return
    driver.load(scratch)
    _answer_as_h100()
    platforms._current_platform = _h100()
    _allow_any_head_size()


class _Idle:
    """Takes every call and does nothing: a stream or an event of a GPU that is not there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


def _answer_as_h100() -> None:
    """What vLLM's layers ask torch itself, past its platform."""
    answers = {
        "get_device_capability": lambda *_: _CAPABILITY,
        "get_device_name": lambda *_: _NAME,
        "get_device_properties": lambda *_: _PROPERTIES,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "Stream": _Idle,  # a shared expert gets one of its own
        "Event": _Idle,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver as triton

    # Kernels of linear attention ask it while they are imported.
    target = GPUTarget("cuda", 10 * _CAPABILITY[0] + _CAPABILITY[1], _PROPERTIES.warp_size)
    triton.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))


def _allow_any_head_size() -> None:
    """Latent attention asks for a kernel that can run it, which nothing of its weights depends on."""
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    mla_attention.get_mla_prefill_backend = lambda _: MLAPrefillBackendEnum.FLASH_ATTN.get_class()


def _h100() -> Any:
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class AbsentH100(NonNvmlCudaPlatform):  # type: ignore[misc]
        device_type = "cpu"
        dispatch_key = "CPU"
        dist_backend = "gloo"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*_CAPABILITY)

        @classmethod
        def set_device(cls, device: torch.device) -> None:
            """There is none to set."""

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return _MULTIPROCESSORS

    return AbsentH100()
