"""Runs verl's model merger (`python -m verl.model_merger`) on the CPU: its arguments are passed on."""

from __future__ import annotations

import runpy

from megatron_on_cpu import pretend_cuda


def main() -> None:
    """The merger takes the device for CUDA and the backend for NCCL; both become the CPU's."""
    pretend_cuda()
    import verl.utils.device

    verl.utils.device.get_nccl_backend = lambda: "gloo"
    verl.utils.device.get_device_name = lambda: "cpu"
    verl.utils.device.get_device_id = lambda: 0
    runpy.run_module("verl.model_merger", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
