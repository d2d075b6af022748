"""CK718: the model arguments of a launch, against the config.json of its --hf-checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptkit.converters.blocks.latent_attention import WITHOUT_FLAG
from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.megatron.arguments import LLAMA3_FACTOR, comparable_args
from ckptkit.verify.checks.config.arguments import compared, mismatches
from ckptkit.verify.core.check import CheckResult, check
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.launch.checks.engine import engine_config, engine_dims, engine_directory, job_of
from ckptkit.verify.launch.job import Job
from ckptkit.verify.launch.options.arguments import Arguments
from ckptkit.verify.launch.options.argv import options_of
from ckptkit.verify.launch.options.tables import MODULES

# The options that determine an argument, if not only the one of its name.
_DECIDED_BY: Mapping[str, tuple[str, ...]] = {
    "num_query_groups": ("num_query_groups", "group_query_attention"),
    "kv_channels": ("kv_channels", "hidden_size", "num_attention_heads"),
    "add_qkv_bias": ("add_qkv_bias", "add_bias_linear"),
    "position_embedding_type": ("position_embedding_type", "use_rotary_position_embeddings"),
    "moe_layer_freq": ("moe_layer_freq", "num_experts", "num_layers"),
    "moe_ffn_hidden_size": ("moe_ffn_hidden_size", "ffn_hidden_size"),
    "rope_type": ("rope_type", "rotary_scaling_factor"),
    "rope_scaling_factor": ("use_rope_scaling",),
}


def _job(subject: Subject) -> Job:
    """A launch with model arguments and a config to compare them with. Raises NotApplicable for any other."""
    engine_directory(subject)
    job = job_of(subject)
    if not (job.arguments.of_model or job.arguments.refused):
        raise NotApplicable("the launch has no model arguments")
    if job.bridge:
        reason = "miles builds the model from config.json, not from the model arguments"
        raise NotApplicable(f"--megatron-to-hf-mode bridge: {reason}")
    return job


@check("CK718", applies_to=_job)
def model_described(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Compares every argument that describes the model, Megatron's defaults included.

    If the launch does not describe its model, or has unresolved words, only the given arguments are compared.
    """
    job, root = _job(subject), engine_directory(subject)
    given, config = job.arguments, engine_config(root)
    for refused in given.refused:
        result.compared()
        actual = f"{refused.option} {refused.word.text} (at {refused.word.place})"
        hint = "correct the value, at which argparse stops the trainer"
        yield Issue(f"{refused.option} with {refused.expected}", actual, hint, file=refused.word.file)
    if not config:
        raise CannotCheck("--hf-checkpoint has no readable config.json", "CK714", "CK101")
    dims, args = _dims(config, given, result), given.known
    expected = comparable_args(dims)
    is_complete = given.describes_model and not given.anything
    args = args if is_complete else {name: args.get(name, value) for name, value in expected.items()} | args
    args |= {name: expected.get(name) for name in given.unknown}
    args |= {"rope_scaling_factor": LLAMA3_FACTOR} if args.get("use_rope_scaling") and not dims.mla else {}
    result.compared(compared(dims))
    for name, expected_value, actual in mismatches(dims, args):
        if given.unknown.isdisjoint(_DECIDED_BY.get(name, (name,))):
            yield _issue(name, expected_value, actual, given, root)
    if code := [one.word.text for one in options_of(job.text.words) if one.name in MODULES]:
        result.note(f"only the arguments were checked, not the code of {'; '.join(code)}")


def _dims(config: Mapping[str, Any], given: Arguments, result: CheckResult) -> ModelDims:
    """The model of the release, without the multi-token prediction layers that the launch does not train."""
    dims = engine_dims(config)
    if dims.mtp_layers and not given.value("mtp_num_layers", 0):
        result.note(f"the launch trains without the {dims.mtp_layers} multi-token prediction layers of the release")
        return replace(dims, mtp_layers=0)
    return dims


def _issue(name: str, expected: str, actual: str, given: Arguments, root: object) -> Issue:
    deciding = [given.values[one] for one in _DECIDED_BY.get(name, (name,)) if one in given.values]
    where = f"at {', '.join(dict.fromkeys(one.where for one in deciding))}" if deciding else "by default"
    file = deciding[0].file if deciding else None
    expected, actual = f"{name} = {expected} (from {root}/config.json)", f"{name} = {actual} ({where})"
    return Issue(expected, actual, _hint(name, given), file=file)


def _hint(name: str, given: Arguments) -> str:
    if name == "rope_scaling_factor" and given.value("use_rope_scaling"):
        reason = "slime, miles and Megatron-LM do not pass --rope-scaling-factor to the model and use 8"
        return f"set the factor in the model provider: {reason}"
    if name in WITHOUT_FLAG and name not in given.values:
        return "set it in the config of the model before it is built: only miles' fork of Megatron-LM has an option"
    return f"correct --{name.replace('_', '-')} in the model's script, or config.json if the script is right"
