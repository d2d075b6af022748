"""CK114 to CK117: compares the keys of `.metadata` with the training arguments and metadata stored beside them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from typing import Any

from ckptkit.core.dtypes import ITEMSIZE
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import ranges, summarize
from ckptkit.formats.torch_dist.reader import NOT_WEIGHTS, OF_FSDP
from ckptkit.verify.checks.headers.files import names_of
from ckptkit.verify.checks.headers.torch_dist import only_megatron
from ckptkit.verify.core.check import CannotCheck, Issue, NotApplicable, Subject, Tally, check
from ckptkit.verify.evidence.folding import LAYER, MTP_LAYER, by_key

_ROUTED = re.compile(r"(.+\.experts)\.experts\.(\d+)\.(.+)")
# Linear layers whose `_extra_state` both the local and the Transformer Engine spec ask for.
_LINEAR = re.compile(
    r"(.+\.(?:linear_qkv|linear_proj|linear_fc1|linear_fc2|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|eh_proj))\.weight(?:_[wv])?"
)
_SHARD = re.compile(r"(.+)\._extra_state/shard_([\d.]+)_([\d.]+)")


def only_torch_dist(subject: Subject) -> None:
    """For checks of what checkpoints of FSDP runs have no counterpart of."""
    only_megatron(subject)
    with suppress(CkptkitError):  # CK111 says why it cannot be read
        if subject.megatron_files.metadata.layout in OF_FSDP:
            reason = "Megatron-LM names modules as they are under FSDP, and their extra states otherwise"
            raise NotApplicable(reason)


def _weights(subject: Subject) -> list[str]:
    """Keys of the weights. Raises NotApplicable where `.metadata` cannot be read or holds none, which CK111 reports."""
    names_of(subject)
    return [key for key in subject.megatron_files.metadata.tensors if not NOT_WEIGHTS.fullmatch(key)]


def _common(subject: Subject) -> Mapping[str, Any]:
    """Megatron's common state. Raises NotApplicable where it cannot be read, which CK111 reports."""
    try:
        subject.megatron_files.args  # noqa: B018 - a cached property that raises
        return subject.megatron_files.opened.common
    except CkptkitError as error:
        raise CannotCheck("there is no readable common state", "CK111") from error


@check("CK114", applies_to=only_megatron)
def arguments_fit_keys(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Layers, MTP layers, experts, output layer and vocabulary rows against `args`, where `args` say them."""
    _weights(subject)
    args = _common(subject).get("args")
    stated: Mapping[str, Any] = vars(args) if hasattr(args, "__dict__") else {}
    if not stated:
        raise CannotCheck("common.pt holds no training arguments, which Megatron accepts", "CK111")
    specs = subject.megatron_files.opened.specs
    tally.compared(len(specs))
    where = subject.megatron_files.weights / ".metadata"
    for argument, expected, actual, tensors in _against_args(stated, specs):
        yield Issue(f"{argument}: {expected}", actual, names=tensors or None, as_one=True, file=where)


def _against_args(stated: Mapping[str, Any], specs: Mapping[str, Any]) -> Iterator[tuple[str, str, str, list[str]]]:
    """Argument, what it promises, what is stored, and the tensors concerned."""
    yield from _numbers("num_layers", stated, _numbered(specs, LAYER), "decoder layers", "decoder.layers.{}.*")
    what = "multi-token prediction layers"
    yield from _numbers("mtp_num_layers", stated, _numbered(specs, MTP_LAYER), what, "mtp.layers.{}.*")
    for (projection, experts), places in _experts(specs).items():
        what, templates = f"experts in {summarize(places)} {projection}", (f"{place}.experts.{{}}." for place in places)
        yield from _numbers("num_experts", stated, experts, what, *(one + projection for one in templates))
    if "untie_embeddings_and_output_weights" in stated:
        untied, stored = bool(stated["untie_embeddings_and_output_weights"]), "output_layer.weight" in specs
        if untied != stored:
            expected, name = f"{untied}, so {'an' if untied else 'no'} output layer", "output_layer.weight"
            yield "untie_embeddings_and_output_weights", expected, f"{name} is {'not ' * untied}stored", [name]
    vocab = stated.get("vocab_size")
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if type(vocab) is int and name in specs and specs[name].shape[0] < vocab:
            yield "vocab_size", f"{vocab}, so at least as many rows", f"{specs[name].shape[0]} rows", [name]


def _numbered(names: Iterable[str], pattern: re.Pattern[str]) -> set[int]:
    return {int(match[1]) for name in names if (match := pattern.match(name))}


def _experts(names: Iterable[str]) -> dict[tuple[str, frozenset[int]], list[str]]:
    """The places (`decoder.layers.2.mlp.experts`) that have the same experts of a projection."""
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in names:
        if match := _ROUTED.fullmatch(name):
            found[match[1], match[3]].add(int(match[2]))
    return by_key(((projection, frozenset(experts)), place) for (place, projection), experts in found.items())


def _numbers(
    argument: str, stated: Mapping[str, Any], found: Set[int], what: str, *templates: str
) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yields what is wrong where an argument promises the numbers from 0 to its value; None is 0, absent promises none.

    `templates` name what has such a number, with `{}` for it.
    """
    if argument not in stated or type(stated[argument] or 0) is not int:
        return
    promised = set(range(stated[argument] or 0))
    for odd, how in ((promised - found, "not stored"), (found - promised, "also stored")):
        if odd:
            names = [template.format(number) for template in templates for number in sorted(odd)]
            which = f"{ranges(odd)} {how}" if found else "none stored"
            yield argument, f"{len(promised)} {what}", which, names


@check("CK115", applies_to=only_torch_dist)
def layout_matches_metadata(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """One layout in all keys, and the one of `content_metadata`: layers stacked or apart, experts and gate and up too.

    Source: megatron-core `transformer_block.py` (`sharded_state_dict`), `mlp.py`, `moe/experts.py`.
    """
    keys = _weights(subject)
    common = _common(subject)
    tally.compared(len(keys))
    found = {name: [key for key in keys if re.fullmatch(pattern, key)] for name, pattern in _LAYOUTS.items()}
    stated = common.get("content_metadata")
    for want, actual in _layout_faults(
        found, stated if isinstance(stated, Mapping) else {}, _uneven_args(common.get("args"))
    ):
        yield Issue(want, actual, names=found[actual], as_one=True, file=subject.megatron_files.weights)


_LAYOUTS = {
    "layers stacked": r"decoder\.layers\.(?!\d+\.).+",
    "one key a layer": r"decoder\.layers\.\d+\..+",
    # megatron-core's `singleton_local_shards`
    "one key an expert, gate and up apart": r".+\.linear_fc1\.(?:weight|bias)_[wv]|.+\.experts\.experts\.\d+\..+",
    "experts, gate and up together": r".+\.linear_fc1\.(?:weight|bias)|.+\.experts\.experts\.(?!\d+\.).+",
}


def _layout_faults(
    found: Mapping[str, list[str]], stated: Mapping[str, Any], uneven: bool
) -> Iterator[tuple[str, str]]:
    stacked, layered, apart, joined = (bool(keys) for keys in found.values())
    singleton, layers = stated.get("singleton_local_shards"), stated.get("non_homogeneous_layers")
    if stacked and layered:
        yield "all layers stacked, or one key each", "layers stacked"
    elif layers is True and stacked:
        yield "one key a layer, as content_metadata says (non_homogeneous_layers)", "layers stacked"
    elif layers is False and layered and not uneven and not singleton:
        yield "layers stacked, as content_metadata says (non_homogeneous_layers)", "one key a layer"
    if singleton is False and apart:
        wanted = "no key of a single expert, as content_metadata says (singleton_local_shards)"
        yield wanted, "one key an expert, gate and up apart"
    if singleton is True and joined:
        yield "gate and up apart, as content_metadata says (singleton_local_shards)", "experts, gate and up together"


def _uneven_args(args: Any) -> bool:
    """Whether the arguments alone give each layer a key of its own.

    These are `moe_layer_freq` or `linear_attention_freq` as a list or above 1, and heterogeneous blocks.
    """
    stated: Mapping[str, Any] = vars(args) if hasattr(args, "__dict__") else {}
    freqs = [stated.get(name) for name in ("moe_layer_freq", "linear_attention_freq")]
    own = "heterogeneous_layers_config_"
    blocks = any(map(stated.get, ("hetereogenous_dist_checkpoint", f"{own}path", f"{own}encoded_json")))
    return blocks or any(isinstance(freq, (list, tuple)) or (isinstance(freq, int) and freq > 1) for freq in freqs)


@check("CK116", applies_to=only_torch_dist)
def extra_states_there(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """An `_extra_state` for every linear layer that Megatron gives one, with all its shards (layers, experts)."""
    modules = dict.fromkeys(match[1] for key in _weights(subject) if (match := _LINEAR.fullmatch(key)))
    shards: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for key in subject.megatron_files.metadata.objects:
        if match := _SHARD.fullmatch(key):
            shards[match[1]][match[3]].add(match[2])
    if not modules:
        raise NotApplicable("there is no linear layer to have one")
    tally.compared(len(modules))
    where = subject.megatron_files.weights / ".metadata"
    lost = [f"{module}._extra_state" for module in modules if module not in shards]
    yield Issue("an _extra_state object", "none", names=lost, file=where)
    for module, totals in shards.items():
        for total, indices in totals.items():
            if (want := math.prod(map(int, total.split(".")))) != len(indices):
                yield Issue(f"{want} shards of it", f"{len(indices)}", names=[f"{module}._extra_state"], file=where)


@check("CK117", applies_to=only_megatron)
def entries_long_enough(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The length of every entry against the size of its chunk in the dtype of its key; where each file ends."""
    _weights(subject)
    files = subject.megatron_files
    hint, where = "take .metadata and the .distcp files from one save", files.weights / ".metadata"
    for key, stored in files.metadata.tensors.items():
        for chunk in stored.chunks:
            tally.compared()
            need = math.prod(chunk.sizes) * ITEMSIZE[stored.dtype]
            if chunk.blob.length < need:
                want = f"at least {need} bytes for {list(chunk.sizes)} {stored.dtype}"
                yield Issue(want, f"{chunk.blob.length} bytes", hint, names=[key], file=where)
    for path, entries in files.blobs.items():
        end = max(offset + length for offset, length in entries)
        if path.exists() and path.stat().st_size > end:
            actual = f"{path.stat().st_size} bytes: {path.stat().st_size - end} behind its last entry"
            hint = "nothing reads these bytes: save or convert again into an empty directory"
            yield Issue(f"{end} bytes", actual, hint, file=path, severity="warning")
