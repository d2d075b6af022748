"""CK709 and CK715: what training rounds weights to and sends, held against the rollout engine's INT4 checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import read_json
from ckptkit.formats.hf.side_files import quantization_of
from verify.check import Skip, Tally, check
from verify.evidence.expected import is_quantized, weights_of
from verify.evidence.side_files import SideFiles
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.launch.arguments import QAT_FLAG, QAT_GROUP, LaunchArguments
from verify.launch.launch import Launch

# What slime's fake quantization does, whatever the config says. Source: `fake_int4_quant_cuda.cu` and slime's Megatron patch.
_TRAINED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}


def updates(launch: Launch, options: LaunchArguments) -> bool:
    """Whether a trainer sends weights to the engine, which slime and miles then quantize by `ignore` of an INT4 --hf-checkpoint.

    Source: slime `megatron_to_hf/processors/__init__.py`: quantization_config of --hf-checkpoint alone decides, no option.
    """
    return bool(options.qat or launch.load or launch.ref_load)


def _not_said(subject: Subject) -> str | None:
    if subject.launch is None or subject.launch.hf_checkpoint is None:
        return "only preflight of a launch with --hf-checkpoint looks at it"
    options = subject.arguments
    return (
        None
        if options and (options.qat or options.qat_group is not None) and options.qat is not False
        else f"{QAT_FLAG} is not set"
    )


@check(
    "CK709",
    "training rounds to the INT4 weights that the engine serves",
    stage="launch",
    rationale="The trainer takes its group size from a variable, the engine its own from quantization_config. Where "
    "they differ, another policy is served.",
    fix="Set OPEN_TRAINING_INT4_GROUP_SIZE to group_size of the engine's checkpoint, and give an INT4 checkpoint with "
    "symmetric groups as --hf-checkpoint.",
    unless=_not_said,
)
def training_rounds_alike(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Group size, bits and symmetry of `quantization_config` of `--hf-checkpoint` against the launch's variables."""
    launch, options = subject.launch, subject.arguments
    if launch is None or launch.hf_checkpoint is None or options is None:
        raise Skip("only preflight of a launch with --hf-checkpoint looks at it")
    config: Mapping[str, Any] | None = None
    with suppress(CkptkitError):
        config = SideFiles(launch.hf_checkpoint).config
    if not config:
        raise Skip("--hf-checkpoint has no config.json that can be read (CK714, CK101)")
    where = str(launch.hf_checkpoint / "config.json")
    if not is_quantized(config):
        actual = "no quantization_config: the engine serves BF16, and drops INT4 updates without a word"
        yield Issue(
            f"an INT4 checkpoint, since {QAT_FLAG} is set",
            actual,
            "give the INT4 checkpoint as --hf-checkpoint",
            file=where,
        )
        return
    for key, expected, actual in _differing(weights_of(config), options, tally):
        hint = (
            f"make {QAT_GROUP} the group_size of the checkpoint"
            if key == "group_size"
            else "quantize the checkpoint again with `ckptkit quantize`"
        )
        yield Issue(f"{key} = {expected}, as training rounds", f"{key} = {actual}", hint, file=where)


def _differing(weights: Mapping[str, Any], options: LaunchArguments, tally: Tally) -> Iterator[tuple[str, Any, Any]]:
    wanted = _TRAINED | ({"group_size": options.qat_group} if options.qat_group is not None else {})
    for key, expected in wanted.items():
        tally.compared(0)
        if weights.get(key) != expected:
            yield key, expected, weights.get(key)


def _no_updates(subject: Subject) -> str | None:
    launch, options = subject.launch, subject.arguments
    if launch is None or launch.hf_checkpoint is None or options is None:
        return "only preflight of a launch with --hf-checkpoint looks at it"
    if not updates(launch, options):
        return "no trainer of this launch updates the engine"
    with suppress(CkptkitError):
        if _is_int4(SideFiles(launch.hf_checkpoint).config):
            return None
    return "--hf-checkpoint holds no INT4 weights of compressed-tensors"


def _is_int4(config: Mapping[str, Any] | None) -> bool:
    return (
        config is not None
        and is_quantized(config)
        and quantization_of(config).get("quant_method") == "compressed-tensors"
    )


@check(
    "CK715",
    "the engine takes online updates of its INT4 weights",
    stage="launch",
    rationale="SGLang can load some INT4 layers only once. An update of them is lost, or lands in memory that nothing "
    "reads.",
    fix="Quantize the checkpoint that the engine serves again, routed experts only, symmetric: `ckptkit quantize`.",
    unless=_no_updates,
)
def updates_taken(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """What `OnlineQuantizer` refuses for --hf-checkpoint: INT4 Linear layers, zero points, layers packed in part, several groups."""
    launch = subject.launch
    if launch is None or launch.hf_checkpoint is None:
        raise Skip("only preflight of a launch with --hf-checkpoint looks at it")
    # Imported here because it brings torch's kernels with it, which no other check needs.
    from quant.online.quantizer import OnlineQuantizer

    tally.compared(0)
    try:
        found = OnlineQuantizer(read_json(launch.hf_checkpoint / "config.json"), launch.hf_checkpoint)
    except CkptkitError as error:
        expected = "INT4 weights that SGLang can take again at every update"
        yield Issue(expected, error.message, error.hint or "quantize it again", file=launch.hf_checkpoint)
        return
    tally.compared(0, len(found.served.packed))
