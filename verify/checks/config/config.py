"""CK701 to CK703: Megatron's arguments, the source's config and the parallel sizes against the HF config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Final, TypeVar

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.config.values import rope_of
from ckptkit.converters.megatron.arguments import comparable_args
from ckptkit.converters.megatron.parallel import ParallelSizes, refusals, with_remainder
from ckptkit.converters.megatron.pipeline import Pipeline
from ckptkit.converters.planner import dims_of
from ckptkit.core.errors import CkptkitError
from ckptkit.verify.checks.config.arguments import compared, hint_of, mismatches
from ckptkit.verify.core.check import CannotCheck, CheckResult, Issue, Severity, Subject, check, only_if, warning_if
from ckptkit.verify.evidence.expected import is_of_no_family, raw_config_of, require_config
from ckptkit.verify.evidence.folding import chunk_ranges
from ckptkit.verify.evidence.reading import read_values
from ckptkit.verify.launch.words import at_places, first_file

# Keys with an object of settings of the language model.
_NESTED = ("text_config", "rope_parameters", "rope_scaling")
Path = tuple[str, ...]
_Key = TypeVar("_Key", str, Path)
# Keys for storing or running the model; expert_dtype is DeepSeek-V4's format of its experts.
_STORAGE = (
    *("dtype", "torch_dtype", "quantization_config", "transformers_version", "use_cache", "architectures", "auto_map"),
    *("_name_or_path", "expert_dtype"),
)
# Parts of the names of keys that only training reads.
_FOR_TRAINING = ("initializer", "dropout", "aux_loss", "pretraining")
# With the rotary settings, which have two spellings.
_MAY_DIFFER = frozenset({*_STORAGE, "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"})
STAGES = "pipeline stages"  # the fact that lists the layers of a launch's stages
UNKNOWN: Final = "not set"
_has_arguments = only_if(lambda subject: subject.kind == "megatron", "an HF directory stores no training arguments")


@check("CK701", preflight=True, applies_to=_has_arguments)
def arguments_match(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """`args` in common.pt, or run_config.yaml, against the HF config; absent arguments have Megatron's defaults."""
    config = require_config(subject)
    try:
        args = subject.megatron_files.args
    except CkptkitError as error:
        raise CannotCheck("common.pt cannot be read", "CK111") from error
    if not args:
        raise CannotCheck("common.pt has no training arguments to compare with config.json", "CK111")
    # Without --mtp-num-layers a run has no such layers; with it, config.json must agree.
    dims = dims_of(require_config(subject, raw_config_of) if args.get("mtp_num_layers") else config)
    result.compared(compared(dims))
    where = subject.megatron_files.args_file
    for name, expected, actual in mismatches(dims, args):
        yield Issue(f"{name} = {expected}", f"{name} = {actual}", hint_of(name), file=where)


@check("CK702", needs=("source",), preflight=True)
def configs_match(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Both configs by Megatron arguments and rotary settings, then key by key.

    A key in only one config is equal if the default of transformers' class is the same, and a warning if the default
    is unknown. Another model is one finding, which also explains the tensors that differ.
    """
    where, hint = "config.json" if subject.kind == "hf" else "", ""
    if subject.kind == "hf" and subject.source_path and subject.source_is_hf and is_of_no_family(subject):
        differences = plain_differences(subject.hf_files.config, Subject(subject.source_path).hf_files.config, result)
    else:
        here = require_config(subject, raw_config_of)
        hint = "" if subject.options.adapter is None else "write the value that the merged model needs"
        if subject.options.adapter is not None and subject.source is not None:
            there = subject.source.config  # an adapter may untie the output layer
        else:
            there = raw_config_of(Subject(subject.source_path or subject.path, hf_path=subject.hf_path))
        if is_another_model(here, there):
            result.compared()
            values, source = subject.peek(read_values), describe_model(there)
            affected = {*values.compared, *values.only_here, *values.only_source} if values else ()
            actual = f"another model than the source: {describe_model(here)} instead of {source}"
            hint = "check --source and the path of the checkpoint"
            yield Issue(f"the model of the source: {source}", actual, hint, file=where, also_affected=affected)
            return
        differences = config_differences(here, there, result)
    for one in differences:
        expected, actual = f"{one.name} = {one.there}", f"{one.name} = {one.here}"
        yield Issue(expected, actual, hint, file=where, severity=one.severity)


@dataclass(frozen=True)
class ConfigDifference:
    """A setting with different values in two configs."""

    name: str
    here: Any
    there: Any
    severity: Severity = "error"


def config_differences(
    here: Mapping[str, Any], there: Mapping[str, Any], result: CheckResult
) -> Iterator[ConfigDifference]:
    """The settings that differ, one for each key. Raises CkptkitError for an unsupported model."""
    keys = keys_behind(here, there)
    # One finding a key, which may define several arguments.
    named = {keys.get(one[0], one)[0]: keys.get(one[0], one) for one in _differing(_args(here), _args(there), result)}
    for name, expected, actual in named.values():
        yield ConfigDifference(name, actual, expected)
    for name, expected, actual in _differing(_scaling(here), _scaling(there), result):
        yield ConfigDifference(f"rotary {name}", actual, expected)

    def is_reported(path: Path, value: Any) -> bool:
        """Whether a Megatron argument depends on this key, or the value does not fit the other sizes."""
        args = _args_or_none(with_value(here, path, value))
        return args is None or args != _args(here)

    yield from _key_differences(here, there, result, is_reported)


def plain_differences(
    here: Mapping[str, Any], there: Mapping[str, Any], result: CheckResult
) -> Iterator[ConfigDifference]:
    """The settings that differ between two configs of any model, key by key."""
    for name, expected, actual in _differing(_rotary_keys(here), _rotary_keys(there), result):
        yield ConfigDifference(name, actual, expected)
    yield from _key_differences(here, there, result, lambda path, value: False)


def _rotary_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings of a config, or its raw keys if the two spellings contradict each other."""
    try:
        return rope_of(config)
    except CkptkitError:
        return {key: config.get(key) for key in _MAY_DIFFER.difference(_STORAGE)}


def _key_differences(
    here: Mapping[str, Any], there: Mapping[str, Any], result: CheckResult, is_reported: Callable[[Path, Any], bool]
) -> Iterator[ConfigDifference]:
    """The keys that differ and are not reported, without rotary settings and keys for storage."""
    own, others = _model_keys(here), _model_keys(there)
    for path, expected, actual in _differing(own, others, result):
        if is_reported(path, expected):
            continue
        name, default = ".".join(path), None
        if path not in own:
            actual = default = class_default(here, path, expected)
        elif path not in others:
            expected = default = class_default(there, path, actual)
        if expected != actual:
            is_single = path not in own or path not in others
            severity = warning_if(is_single and (default is UNKNOWN or any(part in name for part in _FOR_TRAINING)))
            yield ConfigDifference(name, actual, expected, severity)


def is_another_model(here: Mapping[str, Any], there: Mapping[str, Any]) -> bool:
    """Whether no mistake in a config explains the difference: another width, or another type and other sizes."""
    one, other = dims_of(here), dims_of(there)
    same_sizes = (one.layers, one.experts, one.groups) == (other.layers, other.experts, other.groups)
    return one.hidden != other.hidden or (here.get("model_type") != there.get("model_type") and not same_sizes)


def describe_model(config: Mapping[str, Any]) -> str:
    """The model type and the main sizes, for people."""
    dims = dims_of(config)
    experts = f", {dims.experts} experts" if dims.experts else ""
    return f"{config.get('model_type')} ({dims.layers} layers, hidden size {dims.hidden}{experts})"


def _differing(
    here: Mapping[_Key, Any], there: Mapping[_Key, Any], result: CheckResult
) -> Iterator[tuple[_Key, Any, Any]]:
    """Name, value there and value here of every key that differs; an absent value is None."""
    for name in sorted(here.keys() | there.keys()):
        result.compared()
        if here.get(name) != there.get(name):
            yield name, there.get(name), here.get(name)


def _args(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The Megatron arguments of a config, without rotary scaling, which is compared as config.json has it."""
    return comparable_args(replace(dims_of(config), rope_scaling=None))


def _model_keys(config: Mapping[str, Any]) -> dict[Path, Any]:
    """The keys that describe the model and its parts, without rotary settings and keys for storage."""
    found: dict[Path, Any] = {}
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, Mapping) and key not in _STORAGE:
            excluded = _MAY_DIFFER if key == "text_config" else _STORAGE
            found |= {(key, name): inner for name, inner in value.items() if name not in excluded}
        elif key not in _MAY_DIFFER:
            found[key,] = value
    return found


def _scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary settings as in transformers v5, without Megatron arguments, but with a list of bases by layer."""
    arguments = ("type", "rope_theta", "partial_rotary_factor")
    by_layer = {"rope_theta": bases} if isinstance(bases := config.get("rope_theta"), list) else {}
    rope = rope_of({**config, "rope_theta": None} if by_layer else config)
    return {key: value for key, value in rope.items() if key not in arguments} | by_layer


def is_parallel(subject: Subject) -> bool:
    """Whether a parallel size above 1 was given."""
    return max(subject.tp, subject.options.pp, subject.ep, subject.options.etp or 1) > 1


@check("CK703", preflight=True, applies_to=only_if(is_parallel, "no --tp, --pp, --ep or --etp is above 1"))
def parallel_sizes_divide(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Megatron's limits for tp, etp and ep, where a default etp gives warnings; layers against pp and its options."""
    dims = dims_of(require_config(subject))
    result.compared()
    yield from _stages(dims, subject, result)
    etp = subject.tp if subject.options.etp is None else subject.options.etp
    for one in refusals(dims, ParallelSizes(subject.tp, ep=subject.ep, etp=etp)):
        severity = warning_if(one.option == "etp" and subject.options.etp is None)
        given = {name: word for name, word in subject.sizes_at.items() if name == one.option}
        expected = f"{one.expected}{at_places(given)}"
        yield Issue(expected, one.actual, one.hint, file=first_file(given) or "", severity=severity)


def _stages(dims: ModelDims, subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Whether the layers fit the pipeline. Without a launch, a remainder that `verify` can place is a warning."""
    options, pp = subject.arguments, subject.options.pp
    given = {name: word for name, word in subject.sizes_at.items() if name == "pp"}
    where = first_file(given) or ""
    pattern = options.pattern if options else None
    if pattern is not None and (marks := pattern.partition("/")[0].count("|")):
        if (marks + 1) % pp:
            expected = f"a number of stages in --hybrid-layer-pattern divisible by pp = {pp}{at_places(given)}"
            hint = "change the `|` in the pattern, which separate stages, or choose another --pp"
            yield Issue(expected, f"{marks + 1} stages", hint, file=where)
        return
    layers, size = dims.layers, "num_hidden_layers"
    stored = subject.megatron_files if options is None and subject.kind == "megatron" else None
    if pattern is not None or (stored and stored.readable and stored.hybrid):
        layers, size = 2 * layers, "layers of HybridModel (two for each of num_hidden_layers)"
    try:
        stages = (options.pipeline(layers, pp) if options else Pipeline(layers, pp)).stages
    except CkptkitError as error:
        if options and options.has_uneven_pipeline:
            yield Issue("pipeline options that Megatron accepts", error.message, error.hint or "", file=where)
            return
        last = with_remainder(ParallelSizes(pp=pp), layers).last
        hint = f"divide the layers in the launch, for example with --decoder-last-pipeline-num-layers {last}"
        if not last:
            options_for_it = "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
            hint = f"pass {options_for_it} in the launch, or choose another --pp"
        expected, severity = f"{size} divisible by pp = {pp}{at_places(given)}", warning_if(last and options is None)
        yield Issue(expected, f"{size} = {layers}", hint, file=where, severity=severity)
        return
    if options and options.has_uneven_pipeline:
        result.facts[STAGES] = [
            f"pp rank {stage}: layers {chunk_ranges(chunks)}" for stage, chunks in enumerate(stages)
        ]


def class_default(config: Mapping[str, Any], path: tuple[str, ...], value: Any) -> Any:
    """The default of a key for which another config has `value`, or UNKNOWN if it is computed.

    A default of None is computed from other keys, except for a switch or a factor, which are off.
    """
    if find_spec("transformers") is None:
        return UNKNOWN
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    for part in path[:-1]:
        config = config[part] if isinstance(config.get(part), Mapping) else {}
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING_NAMES:
        return UNKNOWN
    parameter = inspect.signature(CONFIG_MAPPING[model_type].__init__).parameters.get(path[-1])
    default = UNKNOWN if parameter is None else parameter.default
    if default is None:
        return None if type(value) in (bool, float) else UNKNOWN
    return default if type(default) in (bool, int, float, str) else UNKNOWN


def keys_behind(here: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, tuple[str, Any, Any]]:
    """The key in `here` behind each argument that differs, its value there and its value here, if it is a single key.

    A key counts if changing only its value gives `here` the argument of `there`: the argument itself as the value of a
    number (under a key that `there` may spell differently), or the value of the same key in `there`.
    """
    own, others, expected, actual = dict(_leaves(here)), dict(_leaves(there)), _args(there), _args(here)
    changed = {path: others.get(path) for path in {**own, **others} if own.get(path) != others.get(path)}
    exchanged = [(path, value, _args_or_none(with_value(here, path, value))) for path, value in changed.items()]
    behind: dict[str, tuple[str, Any, Any]] = {}
    for name in sorted(expected.keys() | actual.keys()):
        right, wrong = expected.get(name), actual.get(name)
        if right == wrong:
            continue
        equal = [path for path, value in own.items() if {type(value), type(wrong)} <= {int, float} and value == wrong]
        tried = [*((path, right, _args_or_none(with_value(here, path, right))) for path in equal), *exchanged]
        for path, value, args in tried:
            if args is not None and args.get(name) == right:
                behind[name] = ".".join(path), others.get(path, value), own.get(path)
                break
    return behind


def _leaves(config: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in config.items():
        if key in _NESTED and isinstance(value, Mapping):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def with_value(config: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """The config with another value at `path`; a missing key becomes None."""
    key, *rest = path
    inner = config.get(key)
    inner = with_value(inner if isinstance(inner, Mapping) else {}, tuple(rest), value) if rest else value
    return {**config, key: inner}


def _args_or_none(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The arguments of a config, or None if its values do not fit together."""
    try:
        return _args(config)
    except (CkptkitError, TypeError, ValueError):
        return None
