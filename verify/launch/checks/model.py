"""CK718: the model arguments of a launch, against the config.json of its --hf-checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptkit.converters.blocks.latent_attention import WITHOUT_FLAG
from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.megatron.arguments import LLAMA3_FACTOR, comparable_args
from ckptkit.verify.checks.config.arguments import compared, mismatches
from ckptkit.verify.core.check import Tally, check
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.launch.checks.engine import engine_config, engine_dims, engine_directory, job_of
from ckptkit.verify.launch.job import Job
from ckptkit.verify.launch.options.arguments import Arguments
from ckptkit.verify.launch.options.argv import options_of
from ckptkit.verify.launch.options.tables import MODULES

# Options that change what an argument of another name comes to.
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
    """A launch with model arguments and a config to hold them against. Raises NotApplicable for any other."""
    engine_directory(subject)
    job = job_of(subject)
    if not (job.arguments.of_model or job.arguments.refused):
        raise NotApplicable("the launch gives no model arguments")
    if job.bridge:
        how = "miles builds the model from config.json, not from the model arguments"
        raise NotApplicable(f"--megatron-to-hf-mode bridge: {how}")
    return job


@check("CK718", applies_to=_job)
def model_described(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every argument that describes the model, with Megatron's defaults for those that are not given.

    Where only some are given, or not all words are known, those alone are judged.
    """
    job, root = _job(subject), engine_directory(subject)
    given, config = job.arguments, engine_config(root)
    for refused in given.refused:
        tally.compared()
        actual = f"{refused.option} {refused.word.text}, at {refused.word.place}"
        hint = "argparse refuses it, and the trainer stops: give a value of this kind"
        yield Issue(f"{refused.option} with {refused.expected}", actual, hint, file=refused.word.file)
    if not config:
        raise CannotCheck("--hf-checkpoint has no config.json that can be read", "CK714", "CK101")
    dims, args = _dims(config, given, tally), given.known
    expected = comparable_args(dims)
    whole = given.describes_model and not given.anything
    args = args if whole else {name: args.get(name, value) for name, value in expected.items()} | args
    args |= {name: expected.get(name) for name in given.unknown}
    args |= {"rope_scaling_factor": LLAMA3_FACTOR} if args.get("use_rope_scaling") and not dims.mla else {}
    tally.compared(compared(dims))
    for name, want, found in mismatches(dims, args):
        if given.unknown.isdisjoint(_DECIDED_BY.get(name, (name,))):
            yield _issue(name, want, found, given, root)
    if code := [one.word.text for one in options_of(job.text.words) if one.name in MODULES]:
        tally.note(f"{'; '.join(code)}: what this code builds is not judged, only the arguments are")


def _dims(config: Mapping[str, Any], given: Arguments, tally: Tally) -> ModelDims:
    """The model of the release; without --mtp-num-layers a run has no such layers, whatever config.json says."""
    dims = engine_dims(config)
    if dims.mtp_layers and not given.value("mtp_num_layers", 0):
        tally.note(f"the launch trains without the {dims.mtp_layers} multi-token prediction layers of the release")
        return replace(dims, mtp_layers=0)
    return dims


def _issue(name: str, want: str, found: str, given: Arguments, root: object) -> Issue:
    deciding = [given.values[one] for one in _DECIDED_BY.get(name, (name,)) if one in given.values]
    places = ", ".join(dict.fromkeys(one.where for one in deciding))
    where = f"at {places}" if places else "by default, as the launch does not give it"
    file = deciding[0].file if deciding else None
    return Issue(f"{name} = {want}, by {root}/config.json", f"{name} = {found}, {where}", _hint(name, given), file=file)


def _hint(name: str, given: Arguments) -> str:
    if name == "rope_scaling_factor" and given.value("use_rope_scaling"):
        known = "which slime, miles and Megatron-LM do not hand to the model: set it in the model provider"
        return f"Megatron takes a factor of 8 whatever --rope-scaling-factor says, {known}"
    if name in WITHOUT_FLAG and name not in given.values:
        return "Megatron-LM has no option for it (miles' fork has): set it on the model's config before it is built"
    option = f"--{name.replace('_', '-')}"
    return f"correct {option} in the model's script, or config.json if the script is right"
