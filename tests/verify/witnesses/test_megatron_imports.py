"""A package that is installed and broken on this machine counts as absent while Megatron is imported, and only then."""

import importlib
import subprocess
import sys
from importlib.util import find_spec

import pytest
from support.processes import environment

from ckptkit.verify.witnesses.megatron.imports import importing_megatron

NO_DRIVER = "raise OSError('libcuda.so.1: cannot open shared object file')\n"
# Packages that megatron-core imports where they are installed, with what each says without a GPU or its libraries.
BROKEN = {
    "transformer_engine": "raise OSError('libcublas.so.13: cannot open shared object file')\n",
    "apex": "raise ImportError('libcudart.so.12: cannot open shared object file: No such file or directory')\n",
    "deep_ep": "raise AssertionError('Torch not compiled with CUDA enabled')\n",
    "causal_conv1d": "raise ImportError('undefined symbol: _ZN3c104cuda9SetDeviceEab')\n",
    "mamba_ssm": "raise RuntimeError('Found no NVIDIA driver on your system')\n",
    "flashinfer": "raise RuntimeError('No CUDA GPUs are available')\n",
    **dict.fromkeys(("flash_attn", "flash_mla", "fla", "nvidia_resiliency_ext", "tensorrt_llm"), NO_DRIVER),
}


def install(root, name, text):
    (root / name).mkdir(parents=True)
    (root / name / "__init__.py").write_text(text)


@pytest.fixture(autouse=True)
def packages(tmp_path, monkeypatch):
    install(tmp_path, "needs_a_driver", NO_DRIVER)
    install(tmp_path, "expects_that", "try:\n    import needs_a_driver\nexcept OSError:\n    told = True\n")
    install(tmp_path, "is_sound", "value = 7\n")
    (tmp_path / "is_sound" / "kernels.py").write_text(NO_DRIVER)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("needs_a_driver", "expects_that", "is_sound", "is_sound.kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("module", ["needs_a_driver", "needs_a_driver.interface", "is_sound.kernels"])
def test_broken_package_is_not_installed_inside_the_context_alone(module):
    before = list(sys.meta_path)
    with importing_megatron(), pytest.raises(ModuleNotFoundError, match=r"OSError: libcuda\.so\.1"):
        importlib.import_module(module)
    assert sys.meta_path == before
    with pytest.raises(OSError, match="libcuda"):
        importlib.import_module(module)


def test_package_that_expects_another_to_be_broken_is_imported():
    with importing_megatron():
        assert importlib.import_module("expects_that").told
        assert importlib.import_module("is_sound").value == 7


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_megatron_is_imported_although_every_optional_package_is_broken(tmp_path):
    for name, text in BROKEN.items():
        install(tmp_path, name, text)
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    command = [sys.executable, "-W", "ignore", "-c", "from ckptkit.verify.witnesses.megatron import process"]
    ran = subprocess.run(command, env=environment(PYTHONPATH=path), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
