"""CK709, CK715, CK747: whether the engine accepts weights as training rounds and packs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from ckptkit.formats.hf.side_files import describe_quantization, quantization_of
from ckptkit.quant.formats.compressed import stated_scheme
from ckptkit.quant.online.served import served
from ckptkit.verify.core.check import CheckResult, check
from ckptkit.verify.core.issue import Issue, warning_if
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.expected import is_quantized, weights_of
from ckptkit.verify.launch.arguments import QAT_FLAG, QAT_GROUP, LaunchArguments
from ckptkit.verify.launch.checks.engine import engine_config, engine_directory, job_of
from ckptkit.verify.launch.job import Job
from ckptkit.verify.launch.options.argv import Option, last, options_of
from ckptkit.verify.launch.sides import ENGINE
from ckptkit.verify.launch.words import Word, at_places, first_file

# slime's fake quantization, for any config. Source: its `fake_int4_quant_cuda.cu`, Megatron patch.
_FAKE_QUANTIZATION = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}

# The formats that slime or miles packs, and vime: `compressed-tensors` as INT4, `mxfp8` and NVFP4 by miles only.
_SENT = frozenset({"fp8", "compressed-tensors", "mxfp8", "nvfp4"})
_SENT_TO_VLLM = frozenset({"fp8", "compressed-tensors"})
# The values that both assert for `fp8`: key, value, default, and the advice for another value.
_ASSERTED = (
    ("activation_scheme", "dynamic", None, "pass a checkpoint with dynamic activation scales"),
    ("fmt", "e4m3", "e4m3", 'pass a checkpoint in block FP8 of e4m3, or write "e4m3" for its other name float8_e4m3fn'),
)
_SGLANG_OPTION = "--sglang-quantization"
_VERL_OPTION = "actor_rollout_ref.rollout.quantization"  # with fp8 verl sends FP8, otherwise BF16


def _rounding(subject: Subject) -> tuple[Path, LaunchArguments]:
    """The engine's directory and the arguments of a launch with INT4 training. Raises NotApplicable for any other."""
    root, options = engine_directory(subject), subject.arguments or LaunchArguments()
    if options.qat is False or (options.qat is None and options.qat_group is None):
        raise NotApplicable(f"{QAT_FLAG} is not set")
    return root, options


@check("CK709", applies_to=_rounding)
def training_rounds_alike(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Compares group size, bits and symmetry of `quantization_config` with the launch's variables."""
    root, options = _rounding(subject)
    config, where = engine_config(root), str(root / "config.json")
    if not config:
        raise CannotCheck("--hf-checkpoint has no readable config.json", "CK714", "CK101")
    if not is_quantized(config):
        words = {name: word for name, word in _variables(subject).items() if name == QAT_FLAG}
        expected = f"an INT4 checkpoint, since {QAT_FLAG} is set{at_places(words)}"
        actual = f"{describe_quantization(config)}, so the engine serves BF16 and silently drops INT4 updates"
        yield Issue(expected, actual, "pass the INT4 checkpoint as --hf-checkpoint", file=first_file(words) or where)
        return
    weights, given = weights_of(config), _variables(subject)
    expected_values = _FAKE_QUANTIZATION | ({} if options.qat_group is None else {"group_size": options.qat_group})
    for key, expected_value in expected_values.items():
        result.compared()
        if weights.get(key) != expected_value:
            is_group = key == "group_size"
            hint = "quantize the checkpoint again with `ckptkit quantize`"
            hint = f"set {QAT_GROUP} to the group_size of the checkpoint" if is_group else hint
            words = {name: word for name, word in given.items() if is_group or name == QAT_FLAG}
            expected = f"{key} = {expected_value}, as training rounds{at_places(words)}"
            yield Issue(expected, f"{key} = {weights.get(key)}", hint, file=first_file(words) or where)


def _variables(subject: Subject) -> dict[str, Word]:
    """The words of the launch that set the variables of INT4 training, without those of the environment."""
    text, names = job_of(subject).text, (QAT_FLAG, QAT_GROUP)
    words = {name: word for name in names for word in (*text.words, *text.environment.values()) if name in word.text}
    return words | {name: text.environment[name] for name in names if name in text.environment}


def _updated(subject: Subject) -> tuple[Path, Mapping[str, Any]]:
    """Directory and config of an INT4 engine that a trainer updates. Raises NotApplicable for any other."""
    root = engine_directory(subject)
    if not job_of(subject).updates:
        raise NotApplicable("no trainer in this launch updates the engine")
    if subject.not_for_sglang:
        raise NotApplicable(subject.not_for_sglang)
    config = engine_config(root)
    content = quantization_of(config)
    if not isinstance(content, Mapping) or content.get("quant_method") != "compressed-tensors":
        raise NotApplicable("--hf-checkpoint has no INT4 weights of compressed-tensors")
    return root, config


@check("CK715", applies_to=_updated)
def updates_taken(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Schemes that `OnlineQuantizer` refuses, such as zero points, partly packed layers and several groups."""
    root, config = _updated(subject)
    result.compared()
    try:
        result.compared(len(served(config, stated_scheme(config), root).packed))
    except CkptkitError as error:
        expected = "INT4 weights that SGLang can load at every update"
        yield Issue(expected, error.message, error.hint or "quantize the checkpoint again", file=root)


def _sent(subject: Subject) -> tuple[Path, Mapping[str, Any] | None, Option | None]:
    """Directory, quantization and SGLang option of a quantized engine that is updated, or raises NotApplicable."""
    root, job = engine_directory(subject), job_of(subject)
    content = quantization_of(engine_config(root))
    quantization = content if isinstance(content, Mapping) and "quant_method" in content else None
    if job.stack.name == "verl" and quantization and job.sizes[ENGINE].server == "sglang":
        return root, quantization, None
    if not job.updates or job.stack.name != "slime":
        raise NotApplicable("ckptkit does not know how the trainer of this launch packs updates")
    option = last(options_of(job.text.words), _SGLANG_OPTION) if subject.engine != "vllm" else None
    if quantization is None and option is None:
        raise NotApplicable("--hf-checkpoint is not quantized")
    return root, quantization, option


@check("CK747", applies_to=_sent)
def format_is_sent(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Checks `quant_method` of --hf-checkpoint, two keys of FP8 that both trainers assert, and SGLang's own option.

    Source: `megatron_to_hf/processors` of slime, miles and vime; verl `sglang_rollout.py` (update_weights).
    """
    root, content, option = _sent(subject)
    result.compared()
    if job_of(subject).stack.name == "verl":
        yield from _verl_format(job_of(subject), root, content)
        return
    if content is None:
        if option is not None and option.known and option.value is not None:
            places = {option.name: option.word}
            expected = f"--hf-checkpoint in the format {option.value.text.lower()} of {option.name}{at_places(places)}"
            actual = "--hf-checkpoint is unquantized: SGLang packs it once, and updates come in BF16"
            hint = f"quantize the checkpoint (`ckptkit quantize`) and leave out {option.name}"
            file = first_file(places) or str(root / "config.json")
            yield Issue(expected, actual, hint, file=file, severity="warning")
        return
    is_vllm, where, method = subject.engine == "vllm", str(root / "config.json"), content["quant_method"]
    formats, packer = (_SENT_TO_VLLM, "vime") if is_vllm else (_SENT, "slime or miles")
    if method not in formats and (is_vllm or content.get("quant_algo") != "NVFP4"):
        expected = f"a quant_method that {packer} packs: " + ", ".join(sorted(formats))
        actual = f"{shortened(method)}: {'vime sends BF16' if is_vllm else 'slime sends BF16, and miles stops'}"
        hint = "pass a checkpoint in block FP8, INT4 or BF16"
        # slime passes mxfp4 through on purpose; whether the engine accepts BF16 then was not tested.
        yield Issue(expected, actual, hint, file=where, severity=warning_if(method == "mxfp4"))
    for key, expected_value, default, hint in _ASSERTED if method == "fp8" else ():
        result.compared()
        if (value := content.get(key, default)) != expected_value:
            actual = f"{key} is not set" if value is None else f"{key} = {shortened(value)}"
            yield Issue(f"{key} = {expected_value}, which slime and miles require", actual, hint, file=where)


def _verl_format(job: Job, root: Path, content: Mapping[str, Any] | None) -> Iterator[Issue]:
    """An engine that is built for a quantized checkpoint, but updated in BF16. An unresolved value is no fault."""
    word = job.written.get(_VERL_OPTION)
    if content is None or (word is not None and word.text.lower() not in ("null", "none", "")):
        return
    expected = f"{_VERL_OPTION}=fp8, or a model in BF16"
    actual = f"a model in {shortened(content['quant_method'])} without the setting, so verl sends BF16 to SGLang"
    yield Issue(expected, actual, f"set {_VERL_OPTION}=fp8, or pass the model in BF16", file=str(root / "config.json"))
