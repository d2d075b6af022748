"""CK111 to CK117: the files of a Megatron torch_dist directory, and its keys against its arguments. Reads no weight."""

from __future__ import annotations

import math
import re
import sys
from _compat_pickle import IMPORT_MAPPING
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptkit.core.dtypes import ITEMSIZE
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import ranges, summarize
from ckptkit.formats.detect import TRACKER, is_legacy
from ckptkit.formats.hf.reader import read_json
from ckptkit.formats.torch_dist.foreign_names import foreign_name
from ckptkit.formats.torch_dist.reader import NOT_WEIGHTS, OF_FSDP, tiling_problem
from ckptkit.formats.torch_dist.training_state import describe_state, training_state
from ckptkit.verify.checks.headers.files import names_of, require_metadata
from ckptkit.verify.core.check import CannotCheck, Issue, NotApplicable, Subject, check, only_if, warning_if
from ckptkit.verify.core.report import CheckResult
from ckptkit.verify.evidence.folding import LAYER, MTP_LAYER, by_key, group_by_pattern

TRAINING_STATE = "training state"
# Libraries with functions that execute a pickle's arguments; IMPORT_MAPPING adds Python 2's module names.
_RUN = {*sys.stdlib_module_names, *IMPORT_MAPPING, "torch", "numpy"}
# Valid values in metadata.json. megatron-core 0.19 and newer write no entries for common.pt.
_BACKEND: Mapping[str, str | int] = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_ROUTED = re.compile(r"(.+\.experts)\.experts\.(\d+)\.(.+)")
# Linear layers that have an `_extra_state` in both the local and the Transformer Engine spec.
_LINEAR = re.compile(
    r"(.+\.(?:linear_qkv|linear_proj|linear_fc1|linear_fc2|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|eh_proj))\.weight(?:_[wv])?"
)
_SHARD = re.compile(r"(.+)\._extra_state/shard_([\d.]+)_([\d.]+)")
_LAYOUTS = {
    "layers stacked": r"decoder\.layers\.(?!\d+\.).+",
    "one key per layer": r"decoder\.layers\.\d+\..+",
    # megatron-core's `singleton_local_shards`
    "one key per expert, gate and up separate": r".+\.linear_fc1\.(?:weight|bias)_[wv]|.+\.experts\.experts\.\d+\..+",
    "experts joined, gate and up joined": r".+\.linear_fc1\.(?:weight|bias)|.+\.experts\.experts\.(?!\d+\.).+",
}

only_megatron = only_if(lambda subject: subject.kind == "megatron", "an HF directory has no torch_dist files")


@check("CK111", gate=True, applies_to=only_megatron)
def directory_complete(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Tracker, `.metadata`, `metadata.json` and common state are readable; pickles have no foreign names."""
    files = subject.megatron_files
    try:
        weights = files.weights
    except CkptkitError as error:
        yield Issue("a tracker that names an existing directory", error.message, error.hint or "", file=TRACKER)
        return
    result.compared()
    if is_legacy(weights):
        actual = "Megatron's legacy format (mp_rank_*)"
        hint = "export to HF and convert the result: Megatron loads this format only at equal sizes, verify never"
        yield Issue("a torch_dist checkpoint", actual, hint, file=weights, severity="warning")
        return
    files.readable  # noqa: B018 - raises for a format that is not torch_dist
    layout, damage = None, None
    try:
        layout = files.metadata.layout
        files.args  # noqa: B018 - a cached property that raises
    except CkptkitError as error:
        damage = error
    if layout not in OF_FSDP:
        yield from _backend_issues(weights / "metadata.json")
    if damage is not None:
        yield Issue("readable .metadata and common state", damage.message, damage.hint or "", file=weights)
        return
    if (foreign := foreign_name(weights, files.metadata)) is not None:
        name, refusal = foreign
        # Megatron executes pickles; other names may be classes of the trainer.
        severity = warning_if(name.partition(".")[0] not in _RUN)
        expected = "pickles with only the names that Megatron and torch write"
        yield Issue(expected, refusal.message, refusal.hint or "", file=weights, severity=severity)
    if not files.opened.specs:
        inside = summarize(files.metadata.keys)
        hint, only = "pass the directory of the model, or save it again", f", only {inside}" if inside else ""
        yield Issue("the weights of a model", f"no weights{only}", hint, file=weights / ".metadata")
    common = files.opened.common
    if state := describe_state(training_state(files.metadata, common)):
        result.facts[TRAINING_STATE] = [state]
    match, iteration = re.fullmatch(r"iter_(\d+)", weights.name), common.get("iteration")
    if match and type(iteration) is int and iteration != int(match[1]):
        hint = "restore the directory's name: Megatron finds it by that number, but resumes at the stored one"
        expected, actual = f"iteration {int(match[1])}, as in the directory's name", f"{iteration} in the common state"
        yield Issue(expected, f"iteration {actual}", hint, file=weights, severity="warning")


def _backend_issues(file: Path) -> Iterator[Issue]:
    """Formats and versions in metadata.json. Source: megatron-core `dist_checkpointing/core.py`."""
    try:
        content = read_json(file)
    except CkptkitError as error:
        hint = "Megatron recognizes a torch_dist checkpoint by this file: copy it from the save"
        yield Issue("a readable metadata.json", error.message, hint, file=file)
        return
    for key, expected in _BACKEND.items():
        actual = content.get(key)
        if actual != expected and (key == "sharded_backend" or actual is not None):
            yield Issue(f"{key} = {expected!r}", f"{key} = {actual!r}", "save with --ckpt-format torch_dist", file=file)


@check("CK112", gate=True, applies_to=only_megatron)
def entries_inside(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every entry is inside an existing file; entries share bytes only as aliases."""
    require_metadata(subject)
    files = subject.megatron_files
    if not files.blobs:
        raise CannotCheck("not run because .metadata lists no entries", "CK111")
    gone: dict[Path, list[str]] = {}
    for path, stored in files.blobs.items():
        result.compared(len(stored))
        if path.exists():
            yield from _outside(path, stored)
        else:
            gone[path] = [key for keys in stored.values() for key in keys]
    if gone:
        keys = [key for missing in gone.values() for key in missing]
        first, more = next(iter(gone)), len(gone) - 1
        missing = f"{_short(first)} and {more} more files are missing" if more else f"{_short(first)} is missing"
        actual, where = f"{missing}, with {len(keys)} stored entries", files.weights if more else first
        yield Issue("every file that .metadata names", actual, names=keys, as_one=True, file=where)
    for path in sorted(files.weights.glob("*.distcp")):
        if path not in files.blobs and path.stat().st_size:
            hint = "move the file elsewhere: it belongs to another save, or to a save that did not finish"
            actual = ".metadata does not name this file"
            yield Issue("only files that .metadata names", actual, hint, file=path, severity="warning")


def _short(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _outside(path: Path, stored: Mapping[tuple[int, int], Sequence[str]]) -> Iterator[Issue]:
    """One issue if the file is too short for its entries, and one if entries share bytes."""
    size, needed = path.stat().st_size, max(offset + length for offset, length in stored)
    if size < needed:
        beyond = [key for (offset, length), keys in stored.items() if offset + length > size for key in keys]
        actual = f"{_short(path)} is truncated: {size} of {needed} bytes; {len(beyond)} entries are beyond its end"
        hint = "copy the file again, with the .metadata of the same save"
        yield Issue(f"at least {needed} bytes", actual, hint, names=beyond, as_one=True, file=path)
    end, before, shared = 0, "", {}
    for (offset, length), keys in stored.items():
        if offset < end:
            shared[keys[0]] = f"{keys[0]} starts at byte {offset}, inside {before}, which ends at {end}"
        end, before = max(end, offset + length), keys[0]
    if shared:
        actual = next(iter(shared.values())) + f"; {len(shared) - 1} more entries overlap" * (len(shared) > 1)
        yield Issue("a separate byte range for each entry", actual, names=shared, as_one=True, file=path)


@check("CK113", gate=True, applies_to=only_megatron)
def chunks_tile(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The chunks of every tensor in `.metadata` have no hole and no overlap, and are inside it."""
    names_of(subject)
    problems: dict[str, str] = {}
    for key, stored in subject.megatron_files.metadata.tensors.items():
        result.compared()
        if problem := tiling_problem(stored.shape, [(chunk.offsets, chunk.sizes) for chunk in stored.chunks]):
            problems[key] = problem
    where = subject.megatron_files.weights / ".metadata"
    for keys in group_by_pattern(problems):
        yield Issue("chunks that cover the tensor exactly once", problems[keys[0]], names=keys, file=where)


def only_torch_dist(subject: Subject) -> None:
    """Raises NotApplicable for checkpoints of FSDP runs too."""
    only_megatron(subject)
    with suppress(CkptkitError):  # CK111 reports that it cannot be read
        if subject.megatron_files.metadata.layout in OF_FSDP:
            raise NotApplicable("with FSDP, Megatron-LM uses other names for modules and their extra states")


def _weights(subject: Subject) -> list[str]:
    """Keys of the weights. Raises CannotCheck as `names_of`."""
    names_of(subject)
    return [key for key in subject.megatron_files.metadata.tensors if not NOT_WEIGHTS.fullmatch(key)]


def _common(subject: Subject) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Megatron's common state and the arguments in it. Raises CannotCheck if it cannot be read."""
    try:
        subject.megatron_files.args  # noqa: B018 - a cached property that raises
        common = subject.megatron_files.opened.common
    except CkptkitError as error:
        raise CannotCheck("common.pt cannot be read", "CK111") from error
    args = common.get("args")
    return common, vars(args) if hasattr(args, "__dict__") else {}


@check("CK114", applies_to=only_megatron)
def arguments_fit_keys(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Layers, MTP layers, experts, output layer and vocabulary rows against `args`."""
    _weights(subject)
    _, args = _common(subject)
    if not args:
        raise CannotCheck("common.pt has no training arguments, which Megatron accepts", "CK111")
    specs = subject.megatron_files.opened.specs
    result.compared(len(specs))
    where = subject.megatron_files.weights / ".metadata"
    for argument, expected, actual, tensors in _against_args(args, specs):
        yield Issue(f"{expected}, by {argument}", actual, names=tensors or None, as_one=True, file=where)


def _against_args(args: Mapping[str, Any], specs: Mapping[str, Any]) -> Iterator[tuple[str, str, str, list[str]]]:
    """Argument, expected value, actual value, and the tensors concerned."""
    layers, mtp = ({int(match[1]) for match in map(each.match, specs) if match} for each in (LAYER, MTP_LAYER))
    yield from _numbers("num_layers", args, layers, "decoder layers", "decoder.layers.{}.*")
    yield from _numbers("mtp_num_layers", args, mtp, "multi-token prediction layers", "mtp.layers.{}.*")
    numbers: dict[tuple[str, str], set[int]] = defaultdict(set)  # of experts by projection and module
    for match in filter(None, map(_ROUTED.fullmatch, specs)):
        numbers[match[3], match[1]].add(int(match[2]))
    places_of = by_key(((projection, frozenset(experts)), place) for (projection, place), experts in numbers.items())
    for (projection, experts), places in places_of.items():
        what, templates = f"experts in {summarize(places)} {projection}", (f"{place}.experts.{{}}." for place in places)
        yield from _numbers("num_experts", args, experts, what, *(one + projection for one in templates))
    if "untie_embeddings_and_output_weights" in args:
        untied, stored = bool(args["untie_embeddings_and_output_weights"]), "output_layer.weight" in specs
        if untied != stored:
            expected, name = f"{'an' if untied else 'no'} output layer", "output_layer.weight"
            yield "untie_embeddings_and_output_weights", expected, f"{name} is {'not ' * untied}stored", [name]
    vocab = args.get("vocab_size")
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if type(vocab) is int and name in specs and specs[name].shape[0] < vocab:
            yield "vocab_size", f"at least {vocab} rows", f"{specs[name].shape[0]} rows", [name]


def _numbers(
    argument: str, args: Mapping[str, Any], stored: Set[int], what: str, *templates: str
) -> Iterator[tuple[str, str, str, list[str]]]:
    """Compares stored numbers, in tensor names `templates`, with those from 0 to an argument, if it is given."""
    if argument not in args or type(args[argument] or 0) is not int:
        return
    promised = set(range(args[argument] or 0))
    for odd, how in ((promised - stored, "not stored"), (stored - promised, "stored too")):
        if odd:
            names = [template.format(number) for template in templates for number in sorted(odd)]
            yield argument, f"{len(promised)} {what}", f"{ranges(odd)} is {how}" if stored else "none is stored", names


@check("CK115", applies_to=only_torch_dist)
def layout_matches_metadata(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """All keys have one layout, that of `content_metadata`: layers stacked or not, and experts, gate and up too.

    Source: megatron-core `transformer_block.py` (`sharded_state_dict`), `mlp.py`, `moe/experts.py`.
    """
    keys = _weights(subject)
    common, args = _common(subject)
    result.compared(len(keys))
    by_layout = {name: [key for key in keys if re.fullmatch(pattern, key)] for name, pattern in _LAYOUTS.items()}
    content = common.get("content_metadata")
    # Heterogeneous blocks, or a frequency that is a list or above 1, give each layer a key.
    prefix = "heterogeneous_layers_config_"
    uneven = any(map(args.get, ("hetereogenous_dist_checkpoint", f"{prefix}path", f"{prefix}encoded_json")))
    for freq in map(args.get, ("moe_layer_freq", "linear_attention_freq")):
        uneven |= isinstance(freq, (list, tuple)) or (isinstance(freq, int) and freq > 1)
    for expected, actual in _layout_faults(by_layout, content if isinstance(content, Mapping) else {}, uneven):
        yield Issue(expected, actual, names=by_layout[actual], as_one=True, file=subject.megatron_files.weights)


def _layout_faults(
    by_layout: Mapping[str, list[str]], content: Mapping[str, Any], uneven: bool
) -> Iterator[tuple[str, str]]:
    stacked, layered, apart, joined = (bool(keys) for keys in by_layout.values())
    singleton, layers = content.get("singleton_local_shards"), content.get("non_homogeneous_layers")
    source, of_layers = (f"by content_metadata ({key})" for key in ("singleton_local_shards", "non_homogeneous_layers"))
    if stacked and layered:
        yield "either layers stacked or one key per layer, not both", "layers stacked"
    elif layers is True and stacked:
        yield f"one key per layer, {of_layers}", "layers stacked"
    elif layers is False and layered and not uneven and not singleton:
        yield f"layers stacked, {of_layers}", "one key per layer"
    if singleton is False and apart:
        yield f"experts joined, {source}", "one key per expert, gate and up separate"
    if singleton is True and joined:
        yield f"one key per expert, gate and up separate, {source}", "experts joined, gate and up joined"


@check("CK116", applies_to=only_torch_dist)
def extra_states_there(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every linear layer has an `_extra_state` with all its shards (layers, experts), if Megatron gives it one."""
    modules = dict.fromkeys(match[1] for key in _weights(subject) if (match := _LINEAR.fullmatch(key)))
    shards: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for match in filter(None, map(_SHARD.fullmatch, subject.megatron_files.metadata.objects)):
        shards[match[1]][match[3]].add(match[2])
    if not modules:
        raise NotApplicable("the checkpoint has no linear layer with an _extra_state")
    result.compared(len(modules))
    where = subject.megatron_files.weights / ".metadata"
    lost = [f"{module}._extra_state" for module in modules if module not in shards]
    yield Issue("an _extra_state object for each linear layer", "missing", names=lost, file=where)
    for module, totals in shards.items():
        for total, indices in totals.items():
            if (count := math.prod(map(int, total.split(".")))) != len(indices):
                names = [f"{module}._extra_state"]
                yield Issue(f"{count} shards of the object", f"{len(indices)} shards", names=names, file=where)


@check("CK117", applies_to=only_megatron)
def entries_long_enough(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The length of every entry against the size of its chunk in the dtype of its key; the end of each file."""
    _weights(subject)
    files = subject.megatron_files
    hint, where = "take .metadata and the .distcp files from one save", files.weights / ".metadata"
    for key, stored in files.metadata.tensors.items():
        for chunk in stored.chunks:
            result.compared()
            needed = math.prod(chunk.sizes) * ITEMSIZE[stored.dtype]
            if chunk.blob.length < needed:
                expected = f"at least {needed} bytes for {list(chunk.sizes)} {stored.dtype}"
                yield Issue(expected, f"{chunk.blob.length} bytes", hint, names=[key], file=where)
    for path, entries in files.blobs.items():
        end = max(offset + length for offset, length in entries)
        if path.exists() and path.stat().st_size > end:
            actual = f"{path.stat().st_size} bytes, of which {path.stat().st_size - end} are after the last entry"
            hint = "save or convert again into an empty directory: the last bytes are never read"
            yield Issue(f"{end} bytes, where the last entry ends", actual, hint, file=path, severity="warning")
