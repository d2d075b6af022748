"""CK709, CK715, CK747: what training rounds weights to and sends, and what the rollout engine's checkpoint packs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from ckptkit.formats.hf.side_files import quantization_of
from quant.formats.compressed import stated_scheme
from quant.online.served import served
from verify.check import Skip, Tally, check
from verify.evidence.expected import is_quantized, weights_of
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.launch.arguments import QAT_FLAG, QAT_GROUP, LaunchArguments
from verify.launch.checks.engine import engine_config, engine_of, job_of, unless_skipped
from verify.launch.options.argv import Option, last, options_of
from verify.launch.words import Word, at_places, first_file
from verify.report import Severity

# What slime's fake quantization does whatever the config says. Source: its `fake_int4_quant_cuda.cu`, Megatron patch.
_TRAINED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}

# The formats that slime or miles packs: `compressed-tensors` as INT4, `mxfp8` and NVFP4 by miles alone.
_SENT = frozenset({"fp8", "compressed-tensors", "mxfp8", "nvfp4"})
# What both assert of `fp8`: key, value, and what stands for a key that is not there.
_ASSERTED = (("activation_scheme", "dynamic", None), ("fmt", "e4m3", "e4m3"))


def _rounding(subject: Subject) -> tuple[Path, LaunchArguments]:
    """The engine's directory and the arguments of a launch whose training rounds weights. Raises Skip for any other."""
    root, options = engine_of(subject), subject.arguments or LaunchArguments()
    if options.qat is False or (options.qat is None and options.qat_group is None):
        raise Skip(f"{QAT_FLAG} is not set")
    return root, options


@check(
    "CK709",
    "training rounds to the INT4 weights that the engine serves",
    stage="launch",
    rationale=(
        "The trainer takes its group size from a variable, the engine its own from quantization_config. "
        "Where they differ, another policy is served."
    ),
    fix=(
        "Set OPEN_TRAINING_INT4_GROUP_SIZE to group_size of the engine's checkpoint, "
        "and give an INT4 checkpoint with symmetric groups as --hf-checkpoint."
    ),
    unless=unless_skipped(_rounding),
)
def training_rounds_alike(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Group size, bits and symmetry of `quantization_config` of `--hf-checkpoint` against the launch's variables."""
    root, options = _rounding(subject)
    config, where = engine_config(root), str(root / "config.json")
    if not config:
        raise Skip("--hf-checkpoint has no config.json that can be read (CK714, CK101)")
    if not is_quantized(config):
        words = {name: word for name, word in _variables(subject).items() if name == QAT_FLAG}
        expected = f"an INT4 checkpoint, since {QAT_FLAG} is set{at_places(words)}"
        actual = "no quantization_config: the engine serves BF16, and drops INT4 updates silently"
        yield Issue(expected, actual, "give the INT4 checkpoint as --hf-checkpoint", file=first_file(words) or where)
        return
    weights, given = weights_of(config), _variables(subject)
    for key, wanted in (_TRAINED | ({} if options.qat_group is None else {"group_size": options.qat_group})).items():
        tally.compared(0)
        if weights.get(key) != wanted:
            make = f"make {QAT_GROUP} the group_size of the checkpoint"
            hint = make if key == "group_size" else "quantize the checkpoint again with `ckptkit quantize`"
            words = {name: word for name, word in given.items() if key == "group_size" or name == QAT_FLAG}
            expected = f"{key} = {wanted}, as training rounds{at_places(words)}"
            yield Issue(expected, f"{key} = {weights.get(key)}", hint, file=first_file(words) or where)


def _variables(subject: Subject) -> dict[str, Word]:
    """The words of the launch that set the variables of INT4 training; those of an environment stand nowhere."""
    text = job_of(subject).text
    words = [*text.words, *text.environment.values()]
    held = {name: word for name in (QAT_FLAG, QAT_GROUP) for word in words if name in word.text}
    return held | {name: text.environment[name] for name in (QAT_FLAG, QAT_GROUP) if name in text.environment}


def _updated(subject: Subject) -> tuple[Path, Mapping[str, Any]]:
    """Directory and config of an INT4 engine that a trainer updates. Raises Skip for any other."""
    root = engine_of(subject)
    if not job_of(subject).updates:
        raise Skip("no trainer of this launch updates the engine")
    if (subject.arguments or LaunchArguments()).server == "vllm":
        raise Skip("the rollout engine of the launch is vLLM, not SGLang")
    config = engine_config(root)
    if _method(config) != "compressed-tensors":
        raise Skip("--hf-checkpoint holds no INT4 weights of compressed-tensors")
    return root, config


def _method(config: Mapping[str, Any]) -> object:
    content = quantization_of(config)
    return content.get("quant_method") if isinstance(content, Mapping) else None


@check(
    "CK715",
    "the engine takes online updates of its INT4 weights",
    stage="launch",
    rationale=(
        "SGLang can load some INT4 layers only once. An update of them is lost, or lands in memory that nothing reads."
    ),
    fix="Quantize the checkpoint that the engine serves again, routed experts only, symmetric: `ckptkit quantize`.",
    unless=unless_skipped(_updated),
)
def updates_taken(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """What `OnlineQuantizer` refuses: INT4 Linear layers, zero points, layers packed in part, several groups."""
    root, config = _updated(subject)
    tally.compared(0)
    try:
        tally.compared(0, len(served(config, stated_scheme(config), root).packed))
    except CkptkitError as error:
        expected = "INT4 weights that SGLang can take again at every update"
        yield Issue(expected, error.message, error.hint or "quantize it again", file=root)


# By the value of SGLang's --quantization, the methods of a checkpoint that it takes besides the value itself.
# Source: SGLang `ModelConfig._verify_quantization`, which raises for others; ModelOpt's is told from its algorithm.
_TAKEN: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("modelopt_fp8", "modelopt_fp4", "modelopt_mixed", "modelopt", "petit_nvfp4"), ("modelopt",)),
    **dict.fromkeys(("w8a8_int8", "w8a8_fp8", "auto-round-int8"), ("compressed-tensors", "compressed_tensors")),
    "nvfp4_online": ("fp8",),
}
_ENGINE_OPTION = "--sglang-quantization"


def _sent(subject: Subject) -> tuple[Path, Mapping[str, Any] | None, Option | None]:
    """Directory and quantization of an engine that slime or miles updates, and what the launch makes of it.

    Raises Skip for any other, and where neither says anything.
    """
    root, job = engine_of(subject), job_of(subject)
    if not job.updates or job.stack.name != "slime":
        raise Skip("neither slime nor miles updates the engine of this launch")
    content, option = quantization_of(engine_config(root)), last(options_of(job.text.words), _ENGINE_OPTION)
    stated = content if isinstance(content, Mapping) and "quant_method" in content else None
    if stated is None and option is None:
        raise Skip("--hf-checkpoint is not quantized")
    return root, stated, option


@check(
    "CK747",
    "the trainer can send the format that the engine serves",
    stage="launch",
    rationale=(
        "slime and miles pack each update as quantization_config of --hf-checkpoint says. Of a format that it does not "
        "know, slime sends BF16 without an error, and miles stops at the first update."
    ),
    fix=(
        "Give an --hf-checkpoint in block FP8 or INT4, or in BF16; leave --sglang-quantization out, which SGLang takes "
        "from the checkpoint."
    ),
    unless=unless_skipped(_sent),
)
def format_is_sent(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """`quant_method` of `--hf-checkpoint`, of FP8 the two keys that both trainers assert, and the engine's own option.

    Source: `megatron_to_hf/processors` of slime and of miles.
    """
    root, content, option = _sent(subject)
    tally.compared(0)
    if option is not None and option.known and option.value is not None:
        yield from _engine_option(root, content, option)
    if content is None:
        return
    where, method = str(root / "config.json"), content["quant_method"]
    if method not in _SENT and content.get("quant_algo") != "NVFP4":
        expected = "a quant_method that slime or miles packs: " + ", ".join(sorted(_SENT))
        actual = f"{shortened(method)}: slime sends BF16 to it, miles stops"
        # slime names mxfp4 as what it passes through on purpose; whether the engine takes BF16 there was not run.
        severity: Severity = "warning" if method == "mxfp4" else "error"
        hint = "give a checkpoint in block FP8, INT4 or BF16"
        yield Issue(expected, actual, hint, file=where, severity=severity)
    for key, wanted, default in _ASSERTED if method == "fp8" else ():
        tally.compared(0)
        if (found := content.get(key, default)) != wanted:
            actual = "not set" if found is None else shortened(found)
            hint = "give a checkpoint whose activations are scaled as they come"
            yield Issue(f"{key} = {wanted}, which slime and miles assert", actual, hint, file=where)


def _engine_option(root: Path, content: Mapping[str, Any] | None, option: Option) -> Iterator[Issue]:
    """What SGLang's own option says otherwise than the checkpoint, and so than what the trainer sends."""
    value = str(option.value and option.value.text).lower()
    places = {option.name: option.word}
    where = first_file(places) or str(root / "config.json")
    if content is None:
        expected = f"an --hf-checkpoint in the format of {_ENGINE_OPTION}{at_places(places)}"
        actual = f"{value} beside an unquantized checkpoint: SGLang packs it once, and each update is sent in BF16"
        hint = f"quantize the checkpoint (`ckptkit quantize`), and leave {_ENGINE_OPTION} out"
        yield Issue(expected, actual, hint, file=where, severity="warning")
        return
    method = str(content["quant_method"]).lower()
    if value != method and method not in _TAKEN.get(value, ()):
        expected = f"{_ENGINE_OPTION} {method}, as {root}/config.json{at_places(places)}"
        actual = f"{value}: SGLang stops at its start"
        yield Issue(expected, actual, f"leave {_ENGINE_OPTION} out", file=where)
