"""Makes the archive beside it: `make.py CHECKOUT FOLDER` runs Megatron-LM's own converter from torch_dist on the CPU.

CHECKOUT is Megatron-LM (of August 2026), whose `tools/checkpoint/checkpoint_inspector.py` makes `fsdp_dtensor` of the
checkpoint that `megatron_versions/0.16.1.tar.xz` holds. Needs megatron-core 0.19. No test runs this.
"""

from __future__ import annotations

import dataclasses
import sys
import tarfile
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DeviceMesh

SOURCE = Path(__file__).parents[1] / "megatron_versions" / "0.16.1.tar.xz"


def on_the_cpu() -> None:
    """The converter asks for GPUs."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    own = DeviceMesh.from_group
    on_cpu: Any = lambda group, device_type, **more: own(group, "cpu", **more)  # noqa: E731
    DeviceMesh.from_group = staticmethod(on_cpu)  # type: ignore[method-assign]


def without_classes(file: Path) -> None:
    """Takes out of common.pt what megatron-core does not load: slime's data class, numpy's numbers."""
    module = types.ModuleType("slime.utils.eval_config")
    config = dataclasses.make_dataclass("EvalDatasetConfig", [("name", str), ("path", str), ("top_p", float, 1.0)])
    config.__module__ = module.__name__
    vars(module)["EvalDatasetConfig"] = config
    sys.modules |= {name: types.ModuleType(name) for name in ("slime", "slime.utils")} | {module.__name__: module}
    common = torch.load(file, weights_only=False)
    del common["args"].eval_datasets, common["opt_param_scheduler"]
    torch.save(common, file)


def main() -> None:
    """Converts, and packs `VERSION.tar.xz`."""
    on_the_cpu()
    sys.path.insert(0, str(Path(sys.argv[1]) / "tools" / "checkpoint"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with tarfile.open(SOURCE) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 has it
            archive.extractall(folder / "in")  # noqa: S202 - filtered, as far as Python can
        without_classes(folder / "in" / "common.pt")
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        import checkpoint_inspector
        from megatron.core.package_info import __version__

        checkpoint_inspector.check_gpu_memory = lambda threshold=0.9: False
        checkpoint_inspector.convert_checkpoint(
            str(folder / "in"), str(folder / "out"), True, torch.distributed.group.WORLD
        )
        with tarfile.open(Path(sys.argv[2]) / f"{__version__}.tar.xz", "w:xz", preset=9) as archive:
            for file in sorted((folder / "out").iterdir()):
                archive.add(file, file.name)


if __name__ == "__main__":
    main()
