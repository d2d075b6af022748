"""Which exceptions of a witness are verdicts on the checkpoint: by their phase, and by whose code raised them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import text_with

from ckptkit.verify.witnesses.process.exit_report import (
    ExitReport,
    Phase,
    PhaseLog,
    exit_report_of,
    how_it_ended,
    is_verdict,
)
from ckptkit.verify.witnesses.sglang.adapter import BUILD, LOAD, REPACK, SET_UP
from ckptkit.verify.witnesses.vllm.adapter import BUILD as VLLM_BUILD
from ckptkit.verify.witnesses.vllm.adapter import BUILD_WITHOUT_GPU
from ckptkit.verify.witnesses.vllm.adapter import LOAD as VLLM_LOAD
from ckptkit.verify.witnesses.vllm.adapter import SET_UP as VLLM_SET_UP

MEGATRON_LOAD = Phase("loading the weights", ("megatron", "torch"))
Call = Callable[..., Any]


def function(module: str, source: str, name: str = "f") -> Call:
    """A function that looks as if it stood in `module`."""
    found: dict[str, Any] = {"__name__": module}
    exec(source, found)  # noqa: S102
    result: Call = found[name]
    return result


def calling(module: str, inner: Call, name: str = "f") -> Call:
    """A function of `module` that calls another one."""
    call = function(module, f"def {name}(inner):\n    inner()\n", name)
    return lambda: call(inner)


def raising(module: str, statement: str = "raise ValueError('no')", name: str = "f") -> Call:
    return function(module, f"def {name}():\n    {statement}\n", name)


def chain(*modules: str, statement: str = "raise ValueError('no')") -> Call:
    """Each module's function calls the next one's; the last one does `statement`."""
    call = raising(modules[-1], statement)
    for module in reversed(modules[:-1]):
        call = calling(module, call)
    return call


def error_of(call: Call) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        call()
    return caught.value


OURS, LOADER, MODEL, QUANTIZER = (
    "ckptkit.verify.x",
    "sglang.srt.model_loader.loader",
    "sglang.srt.models.qwen2",
    "sglang.srt.layers.quantization.fp8",
)


DISPATCH = "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors"


@pytest.mark.parametrize(
    ("statement", "verdict"),
    [
        ("raise ImportError('Other method (CompressedTensorsW4A16Sparse24) is not supported now')", True),
        ("raise NotImplementedError('No compressed-tensors compatible scheme was found.')", True),
        ("raise NotImplementedError('Current platform does not support w4a4 nvfp4 quantization.')", False),
        ("raise NotImplementedError('The W4A8Int8 Fused MoE scheme is implemented only for NPU for now.')", False),
        ("raise RuntimeError('Quantization scheme is not supported for ', 'the current GPU. Min: 80. ')", False),
        ("import no_such_package", False),
    ],
)
def test_a_config_that_is_refused_by_its_format_is_a_verdict(statement: str, verdict: bool) -> None:
    """SGLang says of formats that it does not have by an ImportError, which elsewhere is about the machine."""
    assert is_verdict(error_of(chain(OURS, LOADER, MODEL, DISPATCH, statement=statement)), BUILD) is verdict


VLLM_LOADER, VLLM_MODEL = "vllm.model_executor.model_loader.base_loader", "vllm.model_executor.models.qwen3_moe"
VLLM_DISPATCH = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
VLLM_FP8 = "vllm.model_executor.layers.quantization.utils.fp8_utils"
# What vLLM 0.26.0 and 0.33.0 say while they build a model, and by which module.
OF_CONFIG = [
    ((VLLM_MODEL,), "raise ValueError('Unsupported activation: gelu. Only silu is supported for now.')"),
    (("vllm.models.deepseek_v32.nvidia.model",), "raise ValueError('Unsupported activation: gelu.')"),
    (
        (VLLM_MODEL, VLLM_DISPATCH),
        "raise NotImplementedError('No compressed-tensors compatible scheme was found for layer_name=1')",
    ),
    ((VLLM_FP8,), "raise ValueError('Weight output_partition_size = 96 is not divisible by block_n = 128.')"),
    ((VLLM_MODEL,), "from transformers import Qwen3Config; Qwen3Config().norm_topk_prob"),
]
OF_DEVICE = [
    (("vllm.model_executor.layers.fused_moe.oracle",), "raise NotImplementedError('No WNA16 MoE backend supports it')"),
    (("vllm.model_executor.layers.fused_moe.layer",), "raise ValueError('no')"),
    ((VLLM_MODEL,), "raise ValueError('Failed to find a kernel that can implement the WNA16 linear layer')"),
    ((VLLM_MODEL,), "raise AssertionError"),
    ((VLLM_MODEL,), "None.shape"),
    ((VLLM_MODEL,), "from types import SimpleNamespace; SimpleNamespace().regs_per_multiprocessor"),
    ((VLLM_MODEL,), "{}['an H100']"),
    ((VLLM_MODEL, "torch.cuda"), "raise RuntimeError('Found no NVIDIA driver on your system')"),
    ((VLLM_DISPATCH,), "raise RuntimeError('Quantization scheme is not supported for the current GPU.')"),
    (
        (VLLM_LOADER,),
        "exec(compile('raise ValueError(1)', 'a module', 'exec'), {'__name__': 'vllm.model_executor.models.qwen3'})",
    ),
]


@pytest.mark.parametrize(("modules", "statement"), OF_CONFIG)
def test_what_vllm_says_of_a_config_is_a_verdict_without_a_gpu(modules: tuple[str, ...], statement: str) -> None:
    error = error_of(chain(OURS, VLLM_LOADER, *modules, statement=statement))
    assert [is_verdict(error, phase) for phase in (BUILD_WITHOUT_GPU, VLLM_BUILD, VLLM_SET_UP)] == [True, True, False]


@pytest.mark.parametrize(("modules", "statement"), OF_DEVICE)
def test_what_may_be_due_to_the_absent_gpu_is_none(modules: tuple[str, ...], statement: str) -> None:
    assert not is_verdict(error_of(chain(OURS, VLLM_LOADER, *modules, statement=statement)), BUILD_WITHOUT_GPU)


def test_the_same_words_are_a_verdict_where_vllm_loads_weights_or_has_a_gpu() -> None:
    refusal = error_of(chain(OURS, VLLM_LOADER, "vllm.model_executor.layers.fused_moe.layer"))
    assert [is_verdict(refusal, phase) for phase in (BUILD_WITHOUT_GPU, VLLM_BUILD, VLLM_LOAD)] == [False, True, True]


FEED = (OURS, LOADER, OURS, MODEL, OURS)  # ours, while SGLang asks it for the next tensor
VERDICTS = [
    ((OURS, LOADER, MODEL), BUILD),
    ((OURS, LOADER, MODEL, "torch.nn.modules.linear"), BUILD),
    ((OURS, LOADER, QUANTIZER, "compressed_tensors.quantization"), BUILD),
    ((OURS, LOADER, OURS, MODEL, "sglang.srt.layers.linear"), LOAD),
    ((*FEED, "sglang.srt.model_loader.weight_utils"), LOAD),  # SGLang reads the file through our feed
    ((OURS, QUANTIZER), REPACK),
    ((OURS, "megatron.core.dist_checkpointing.serialization"), MEGATRON_LOAD),
    ((OURS, "torch.nn.modules.module"), MEGATRON_LOAD),
]
NONE = [
    ((OURS,), LOAD),
    (("__main__", "ckptkit.x"), LOAD),
    (FEED, LOAD),
    ((*FEED, "safetensors.torch"), LOAD),
    ((OURS, LOADER), BUILD),  # before the model's constructor: how we called the loader
    ((OURS, MODEL), SET_UP),
    ((OURS, LOADER, "sglang.srt.models.registry"), BUILD),  # no class of that name, or its file cannot be imported
    ((OURS, LOADER, MODEL, "sglang.srt.server_args"), BUILD),  # a setting that we should have made
    ((OURS, LOADER, MODEL, "sglang.srt.distributed.parallel_state"), BUILD),
    ((OURS, LOADER, MODEL, "torch.cuda"), BUILD),
    ((OURS, QUANTIZER, "tvm_ffi.cpp", "subprocess"), REPACK),
    ((OURS, "megatron.core.transformer.transformer_config"), Phase("building the model")),
]


@pytest.mark.parametrize(
    ("modules", "phase", "verdict"), [*((*one, True) for one in VERDICTS), *((*one, False) for one in NONE)]
)
def test_exceptions_of_the_code_under_test_alone_are_verdicts(
    modules: tuple[str, ...], phase: Phase, verdict: bool
) -> None:
    assert is_verdict(error_of(chain(*modules)), phase) is verdict


@pytest.mark.parametrize(
    "statement",
    [
        "import a_package_that_nobody_has",
        "raise OSError('libcuda.so.1: cannot open shared object file: No such file or directory')",
        "raise MemoryError",
        "raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')",
        'raise RuntimeError("DefaultCPUAllocator: can\'t allocate memory: you tried to allocate 8 bytes")',
        "raise AttributeError(\"'_OpNamespace' 'sgl_kernel' object has no attribute 'gptq_marlin_repack'\")",
        "raise NotImplementedError('Could not run')",
        "undefined()",
        "raise SystemExit(1)",
        "raise RuntimeError('sgl_kernel is needed') from ImportError('no sgl_kernel')",
        # while a module is imported
        "exec(compile('raise ValueError', 'a module', 'exec'), {'__name__': 'sglang.srt.models.qwen2_parts'})",
    ],
)
def test_what_is_about_the_machine_is_no_verdict(statement: str) -> None:
    assert not is_verdict(error_of(chain(OURS, LOADER, MODEL, statement=statement)), BUILD)


def test_a_call_with_the_wrong_arguments_is_our_fault() -> None:
    """As with `initialize_moe_config`, which takes none from 0.5.23 on: Python raises in the frame of the caller."""
    theirs = function(MODEL, "def f():\n    pass\n")
    ours = function(OURS, "def f(inner):\n    inner('server args')\n")
    error = error_of(lambda: ours(theirs))
    assert isinstance(error, TypeError)
    assert not is_verdict(error, BUILD)


def test_what_torch_raises_below_the_record_of_writes_is_sglangs() -> None:
    """Every torch operation passes through our dispatch mode: a shape that does not fit is raised beyond it."""
    torch_raises = raising(
        "torch._ops", "raise RuntimeError('The size of tensor a (640) must match the size of tensor b (352)')"
    )
    around = calling("ckptkit.verify.witnesses.sglang.writes", torch_raises, "__torch_dispatch__")
    assert is_verdict(error_of(calling(OURS, calling(MODEL, around))), LOAD)
    own = raising("ckptkit.verify.witnesses.sglang.writes", name="__torch_dispatch__")
    assert not is_verdict(error_of(calling(OURS, calling(MODEL, own))), LOAD)


def test_a_checkpoint_exception_is_read_with_what_the_ranks_raised() -> None:
    """torch's own class, no Exception: it wraps what each rank raised."""
    from torch.distributed.checkpoint.api import CheckpointException

    def raised(inner: BaseException) -> BaseException:
        def f() -> None:
            raise CheckpointException("loading", {0: (inner, [])})  # type: ignore[arg-type]

        return error_of(calling(OURS, calling("megatron.core.dist_checkpointing", f)))

    assert is_verdict(raised(ValueError("Size mismatch between saved [1] and current [2]")), MEGATRON_LOAD)
    assert not is_verdict(raised(MemoryError()), MEGATRON_LOAD)


def test_phase_log_keeps_phase_and_exception(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert exit_report_of(path).phase == text_with("importing")
    with pytest.raises(ValueError, match="no"), PhaseLog(path) as phases:
        phases.enter(BUILD)
        assert exit_report_of(path) == ExitReport("building the model")
        chain(OURS, MODEL)()
    ending = exit_report_of(path)
    assert (ending.phase, ending.verdict) == ("building the model", True)
    assert ending.message == "ValueError: no (at <string>, line 2, in f)"


def test_an_exception_of_a_library_is_told_on_one_line_without_where_it_is_installed(tmp_path: Path) -> None:
    path, layer = tmp_path / "report.json", torch.nn.Linear(2, 3)
    with pytest.raises(RuntimeError), PhaseLog(path) as phases:
        phases.enter(LOAD)
        layer.load_state_dict({"bias": torch.ones(4)})
    assert exit_report_of(path).message.startswith(
        'RuntimeError: Error(s) in loading state_dict for Linear: Missing key(s) in state_dict: "weight". size mismatch'
    )
    assert " (at torch/nn/modules/module.py, line " in exit_report_of(path).message
    assert "\n" not in exit_report_of(path).message


@pytest.mark.parametrize("step", ["", "the tensor a"])
def test_an_exception_is_told_with_the_step_that_it_came_in(step: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with pytest.raises(ValueError, match="no"), PhaseLog(path) as phases:
        phases.enter(BUILD)
        phases.step("of another phase")
        phases.enter(LOAD)
        if step:
            phases.step(step)
        chain(OURS, MODEL)()
    assert exit_report_of(path).message.endswith(f"in f); {step}" if step else "in f)")


def test_the_end_of_a_process_in_words() -> None:
    assert how_it_ended(0) is None
    assert how_it_ended(1) == "exit code 1"
    assert how_it_ended(-9) == text_with("killed SIGKILL")
    assert how_it_ended(-11) == "killed by SIGSEGV"
