"""Which exceptions of a witness are verdicts on the checkpoint: by their phase, and by whose code raised them."""

import pytest
import torch
from support.messages import text_with

from ckptkit.verify.witnesses.process.exit_report import (
    ExitReport,
    Phase,
    describe_exit_code,
    exit_report_of,
    is_verdict,
)
from ckptkit.verify.witnesses.sglang.adapter import BUILD, LOAD, REPACK, SET_UP
from ckptkit.verify.witnesses.vllm.adapter import BUILD as VLLM_BUILD
from ckptkit.verify.witnesses.vllm.adapter import BUILD_WITHOUT_GPU
from ckptkit.verify.witnesses.vllm.adapter import LOAD as VLLM_LOAD
from ckptkit.verify.witnesses.vllm.adapter import SET_UP as VLLM_SET_UP

MEGATRON_LOAD = Phase("loading the weights", ("megatron", "torch"))


def error_of(*modules, statement="raise ValueError('no')"):
    """What `statement` raises in a function of the last module, which one of the module before calls, and so on.

    A function has the name behind a colon, if any.
    """
    call = None
    for place in reversed(modules):
        module, _, name = place.partition(":")
        found = {"__name__": module, "inner": call}
        exec(f"def {name or 'f'}():\n    {'inner()' if call else statement}\n", found)  # noqa: S102
        call = found[name or "f"]
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
# What SGLang says of formats: an ImportError of those that it does not have is no word on the machine.
OF_FORMATS = [
    ("raise ImportError('Other method (CompressedTensorsW4A16Sparse24) is not supported now')", True),
    ("raise NotImplementedError('No compressed-tensors compatible scheme was found.')", True),
    ("raise NotImplementedError('Current platform does not support w4a4 nvfp4 quantization.')", False),
    ("raise NotImplementedError('The W4A8Int8 Fused MoE scheme is implemented only for NPU for now.')", False),
    ("raise RuntimeError('Quantization scheme is not supported for ', 'the current GPU. Min: 80. ')", False),
    ("import no_such_package", False),
]


def test_a_config_that_is_refused_by_its_format_is_a_verdict():
    found = [
        (statement, is_verdict(error_of(OURS, LOADER, MODEL, DISPATCH, statement=statement), BUILD))
        for statement, _ in OF_FORMATS
    ]
    assert found == OF_FORMATS


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


def test_what_vllm_says_of_a_config_is_a_verdict_without_a_gpu_and_what_may_be_due_to_the_gpu_is_none():
    for modules, statement in OF_CONFIG:
        error = error_of(OURS, VLLM_LOADER, *modules, statement=statement)
        verdicts = [is_verdict(error, phase) for phase in (BUILD_WITHOUT_GPU, VLLM_BUILD, VLLM_SET_UP)]
        assert verdicts == [True, True, False], statement
    for modules, statement in OF_DEVICE:
        error = error_of(OURS, VLLM_LOADER, *modules, statement=statement)
        assert not is_verdict(error, BUILD_WITHOUT_GPU), statement
    refusal = error_of(OURS, VLLM_LOADER, "vllm.model_executor.layers.fused_moe.layer")
    assert [is_verdict(refusal, phase) for phase in (BUILD_WITHOUT_GPU, VLLM_BUILD, VLLM_LOAD)] == [False, True, True]


DISPATCH_MODE = "ckptkit.verify.witnesses.sglang.writes:__torch_dispatch__"  # every torch operation passes it
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
    ((OURS, MODEL, DISPATCH_MODE, "torch._ops"), LOAD),  # a shape that does not fit, beyond our record of writes
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
    ((OURS, MODEL, DISPATCH_MODE), LOAD),
]


def test_exceptions_of_the_code_under_test_alone_are_verdicts():
    assert [one for one in VERDICTS if not is_verdict(error_of(*one[0]), one[1])] == []
    assert [one for one in NONE if is_verdict(error_of(*one[0]), one[1])] == []


OF_THE_MACHINE = [
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
]


def test_what_is_about_the_machine_is_no_verdict():
    found = {one: is_verdict(error_of(OURS, LOADER, MODEL, statement=one), BUILD) for one in OF_THE_MACHINE}
    assert found == dict.fromkeys(OF_THE_MACHINE, False)


@pytest.mark.parametrize(
    ("inner", "verdict"),
    [("ValueError('Size mismatch between saved [1] and current [2]')", True), ("MemoryError()", False)],
)
def test_a_checkpoint_exception_is_read_with_what_the_ranks_raised(inner, verdict):
    """torch's own class, no Exception: it wraps what each rank raised."""
    statement = (
        "from torch.distributed.checkpoint.api import CheckpointException as Error; "
        f"raise Error('loading', {{0: ({inner}, [])}})"
    )
    error = error_of(OURS, "megatron.core.dist_checkpointing", statement=statement)
    assert is_verdict(error, MEGATRON_LOAD) is verdict


@pytest.mark.parametrize("step", ["", "the tensor a"])
def test_an_exit_report_keeps_phase_step_and_exception(step, tmp_path):
    path = tmp_path / "report.json"
    assert exit_report_of(path).phase.name == text_with("importing")
    with pytest.raises(ValueError, match="no"), ExitReport(path) as phases:
        phases.enter(LOAD)
        phases.step = "of another phase"
        phases.enter(BUILD)
        assert exit_report_of(path) == ExitReport(path, BUILD)
        if step:
            phases.step = step
        raise error_of(OURS, MODEL)
    found = exit_report_of(path)
    assert (found.phase, found.verdict) == (BUILD, True)
    assert found.message == "ValueError: no (at <string>, line 2, in f)" + (f"; {step}" if step else "")


def test_an_exception_of_a_library_is_told_on_one_line_without_where_it_is_installed(tmp_path):
    path, layer = tmp_path / "report.json", torch.nn.Linear(2, 3)
    with pytest.raises(RuntimeError), ExitReport(path) as phases:
        phases.enter(LOAD)
        layer.load_state_dict({"bias": torch.ones(4)})
    message = exit_report_of(path).message
    assert message.startswith("RuntimeError: ")
    assert " (at torch/nn/modules/module.py, line " in message
    assert "\n" not in message


def test_the_end_of_a_process_in_words():
    assert [describe_exit_code(0), describe_exit_code(1), describe_exit_code(-11)] == [
        None,
        "exit code 1",
        "killed by SIGSEGV",
    ]
    assert describe_exit_code(-9) == text_with("killed SIGKILL memory")
