"""CK104: index, shards and config name the same tensors; CK730: also those of the vision tower."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.config.values import language_part
from ckptkit.converters.passthrough import lost_towers
from ckptkit.converters.planner import dims_of
from ckptkit.converters.registry import family_of
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec, ranges
from ckptkit.formats.hf.reader import INDEX, SINGLE
from ckptkit.formats.hf.side_files import describe_quantization
from ckptkit.quant.formats.part_names import PACKED, SCALE, SHAPE
from ckptkit.verify.checks.headers.files import names_of, only_hf
from ckptkit.verify.checks.headers.renamed import renamed_of
from ckptkit.verify.checks.quantization.quantization_config import in_second_format, undeclared_of
from ckptkit.verify.core.check import CannotCheck, CheckResult, Issue, NotApplicable, Subject, check, warning_if
from ckptkit.verify.evidence.expected import (
    CACHE_SCALE,
    Expected,
    config_or_none,
    expected_of,
    raw_config_of,
    remarks_of,
    spelling_of,
    tied_head_of,
)
from ckptkit.verify.evidence.files import HfFiles
from ckptkit.verify.evidence.folding import EXPERT, LAYER, MTP_LAYER, by_key, layer_of, layers_of

# All weights in Mistral's own format, which it publishes next to the shards with HF's names.
_CONSOLIDATED = re.compile(r"consolidated(-\d+-of-\d+)?\.safetensors")
_EXPECTED = "only files that the index names"
_DO_NOT_DELETE = "delete no file before `ckptkit diff` has compared them: one may be the only trained copy"
_AGAIN = "convert or download the tensor again; without it the parameter stays random"
_NAME_ITS_CLASS = "set architectures to the class of this value, reward or classification model"
# Heads of transformers' classifiers, of TRL's and verl's value models, and of reward models.
_HEAD = re.compile(
    r"(?:.+\.)?(?:v_head|value_head|reward_head|rm_head|score|classifier|regression_head|qa_outputs)(?:\..+)?"
)
_OUTPUT = ("lm_head.weight", "output_layer.weight", "head.weight")
_TOWER = re.compile(
    r"(?:model\.|thinker\.)*(?:visual|vision_\w+|audio_\w+|multi_modal_projector|mm_projector|embed_vision)\."
)
_MTP_PARTS = re.compile(r"\.(?:eh_proj|enorm|hnorm|shared_head|final_layernorm|embed_tokens)\b")
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
_KIND_KEYS = (
    *("first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step", "moe_layer_freq", "moe_layers_enum"),
    *("mlp_layer_types", "layer_types", "hybrid_override_pattern"),
)


@check("CK104", gate=True, explained_by=("CK103", "CK110"))
def same_names(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Index, headers and config (Megatron: `.metadata` and config) name the same tensors, without duplicates."""
    specs = names_of(subject, listed=True)
    config = config_or_none(subject)
    expected = expected_of(subject)
    result.compared(len(specs) or len(subject.hf_files.unknown))
    if subject.kind == "hf":
        yield from leftovers(subject.hf_files)
    yield from renamed_layers(subject)
    yield from _three_way(subject, specs, expected)
    for text in remarks_of(subject) if config else ():
        result.note(text)
    if subject.kind == "hf" and (tied := tied_head_of(subject)) and tied[0] in specs:
        result.note(f"{tied[0]} is stored although tie_word_embeddings is true; CK211 compares it with {tied[1]}")
    result.facts["tensors per layer"] = layer_table(subject.kinds, dict(config) if config else None)
    if expected is None:
        yield from _uneven(specs)


def _three_way(subject: Subject, specs: Mapping[str, TensorSpec], expected: Expected | None) -> Iterator[Issue]:
    files = subject.hf_files if subject.kind == "hf" else None
    index = files.index if files else None
    unknown = files.unknown if files else frozenset()
    optional = expected.optional if expected else frozenset()
    where = "" if index is None else INDEX
    spelling, promises = spelling_of(subject), expected.shapes if expected else {}
    known: frozenset[str] = frozenset()
    if (change := renamed_of(subject)) is not None:
        known = change.promised.union(change.stored)
        should = f"names such as {min(change.promised)}"
        yield Issue(should, change.change, change.hint, names=change.stored, file=where, as_one=True)
    if undeclared := undeclared_of(subject):
        known |= frozenset(undeclared.values())
        floats = f"{len(undeclared)} weights are stored in 8-bit floats with scales"
        should, actual = "quantization_config in config.json", f"missing, but {floats}: readers treat codes as values"
        hint = "restore quantization_config from the release, or dequantize the weights and remove the scales"
        yield Issue(should, actual, hint, names=undeclared, file="config.json", as_one=True)
    known |= in_second_format(subject)
    config = config_or_none(subject)
    why = Mismatch(config, {**specs, **(index or {})}) if config else None
    every = [names.keys() for names in (specs, index, expected.shapes if expected else None) if names is not None]
    odd = set[str]().union(*(every[0] ^ other for other in every[1:] if every[0] != other))
    for name in dict.fromkeys(name for several in every for name in several if name in odd) if odd else ():
        if name in known or (spelling and spelling.explains(name, specs, promises)):
            continue
        stored, listed = name in specs or name in unknown, index is None or name in index
        promised = expected is None or name in expected.shapes or name in optional
        if not (stored and listed and promised) and (name not in optional or stored or listed):
            should, actual, hint = _verdict(subject, name, stored, listed, promised, index is not None, why)
            yield Issue(should, actual, hint, names=[name], file=where)
    shards, homes = files.shards if files else {}, index or {}
    pairs = ((name, shards.get(homes.get(name, file))) for file, shard in shards.items() for name in shard.specs)
    moved = [name for name, named in pairs if named is not None and named.readable and name not in named.specs]
    yield Issue("in the shard that the index names", "in another shard", "restore the index", moved, where)


def _verdict(
    subject: Subject, name: str, stored: bool, listed: bool, promised: bool, indexed: bool, why: Mismatch | None
) -> tuple[str, str, str]:
    """Expected, actual and hint for a name that is missing from headers, index or config."""
    if not promised:
        if PACKED in name or name.endswith((SCALE, SHAPE)):
            hint = f"{describe_quantization(subject.hf_files.config)}: restore the release's tensors, or quantize again"
            return "no packed tensor, as config.json requires", "a packed tensor is stored", hint
        if CACHE_SCALE.fullmatch(name):
            return (
                "kv_cache_scheme in config.json for the scales of a quantized cache",
                "a scale is stored, but config.json has no kv_cache_scheme",
                "restore kv_cache_scheme, or remove the scales: transformers and SGLang drop them",
            )
        actual = "stored, but unknown to the model of config.json" if stored else "in the index, but in no shard"
        hint = "restore the index: it lists tensors that no file contains"
        return "only tensors of the model of config.json", actual, why.why_unexpected(name) if why and stored else hint
    if not stored:
        lost = indexed and listed
        actual = ("in no shard" if subject.kind == "hf" else "not in .metadata") + ", though the index lists it" * lost
        hint = why.why_missing(name) if why and not lost else _AGAIN
        return "stored, because the model of config.json has it" if promised else "stored", actual, hint
    hint = "restore the index: a loader that follows it leaves this tensor random"
    return "listed in the index", "in a shard, but not in the index", hint


def renamed_layers(subject: Subject) -> Iterator[Issue]:
    """One issue for the tensors of all layers; a warning if transformers renames them on loading."""
    if (spelling := spelling_of(subject)) is None:
        return
    config = raw_config_of(subject)
    family, count = family_of(config), sum(one.startswith(spelling.found) for one in subject.specs)
    if spelling.renamed_on_load:
        user = "the multimodal class uses"
        hint = "take config.json of the multimodal release with its vision tower (transformers and newer vLLM rename "
        hint += "the tensors on loading, SGLang does not)"
    elif not family.towers(config):
        user, hint = "multimodal classes use", "take config.json of the multimodal release"
    elif spelling.found == "model.":
        user, hint = "classes of language models use", "take config.json of the language model"
    else:
        user = "transformers uses internally since 4.52"
        hint = "save with save_original_format=True, which writes the names that SGLang needs"
    hint += f", or rename the tensors to {spelling.expected}* (and in the index)"
    expected = f"names {spelling.expected or 'layers.'}*, as {family.class_of(config)} of config.json uses"
    actual = f"{count} tensors have names {spelling.found}*, which {user}"
    yield Issue(expected, actual, hint, file="config.json", severity=warning_if(spelling.renamed_on_load))


def layer_table(kinds: Iterable[Sequence[str]], config: dict[str, object] | None) -> list[str]:
    """Lines such as `dense layers {0..1}: 14 tensors each`; each of `kinds` has names that differ only in numbers."""
    dims = dims_of(config) if config else None
    counts: Counter[tuple[bool, int]] = Counter()
    for names in kinds:
        for mtp, pattern in ((False, LAYER), (True, MTP_LAYER)):
            if match := pattern.match(names[0]):
                start = match.start(1)  # the same in all of them
                counts.update((mtp, int(name[start : name.index(".", start)])) for name in names)
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for (mtp, layer), count in counts.items():
        groups["MTP layers" if mtp else _kind_of_layer(layer, dims), count].append(layer)
    in_order = sorted(groups.items(), key=lambda item: (item[0][0] == "MTP layers", item[1]))
    return [f"{kind} {ranges(layers)}: {count} tensors each" for (kind, count), layers in in_order]


def _kind_of_layer(layer: int, dims: ModelDims | None) -> str:
    if dims is None:
        return "layers"
    if layer >= dims.layers:
        return "MTP layers" if layer < dims.layers + dims.mtp_layers else "layers beyond the config"
    return "MoE layers" if layer in dims.moe else "dense layers"


def _uneven(names: Iterable[str]) -> Iterator[Issue]:
    """Without a usable config: layers that lack tensors of a kind of layer, and experts that lack a tensor.

    Tensors that at least two layers have are a kind of layer. Models mix full and linear attention, dense layers and
    experts, and some (Gemma 4) use keys as values, or those of an earlier layer.
    """
    parts: dict[int, set[str]] = defaultdict(set)
    experts: dict[str, set[int]] = defaultdict(set)
    for name in (re.sub(r"\.weight_\w+$", ".weight", name) for name in names):  # layers may be left unquantized
        if match := LAYER.match(name):
            parts[int(match[1])].add(name[match.end() :])
        if match := EXPERT.search(name):
            experts[name[match.end() :]].add(int(match[1]))
    counts = Counter(map(frozenset, parts.values()))
    for layer, stored in parts.items():
        fuller = [kind for kind, count in counts.items() if count > 1 and stored < kind]
        if counts[frozenset(stored)] == 1 and fuller:
            lost = [f"layers.{layer}.{name}" for name in sorted(min(fuller, key=len) - stored)]
            yield Issue("stored, as in other layers of this kind", "missing", names=lost)
    for part, numbers in experts.items():
        lost = [f"experts.{expert}.{part}" for expert in sorted(set().union(*experts.values()) - numbers)]
        yield Issue("stored, as in other experts", "missing", names=lost)


def leftovers(files: HfFiles) -> Iterator[Issue]:
    """Tensors in two shards, and weight files that the index does not name."""
    index = files.index or {}
    for homes, names in by_key((tuple(found), name) for name, found in files.duplicates.items()).items():
        named = sorted({index[name] for name in names if name in index})
        home = named[0] if len(named) == 1 and named[0] in homes else None
        others = [file for file in homes if file != home]
        needed = [file for file in others if files.shards[file].specs.keys() - files.duplicates.keys()]
        if home is None:
            hint = "choose one file for these tensors in the index, and write the other without them"
        elif needed:
            hint = f"write {needed[0]} again without these tensors, since it has others too"
        else:
            hint = f"move {' and '.join(others)} elsewhere, and name {home} in the index for these tensors"
        actual = f"stored in {' and '.join(homes)}; the index names {home or ' and '.join(named) or 'neither file'}"
        actual = f"{actual}; {_newest(files.root, [*homes])}"
        yield Issue("each tensor in one shard", actual, f"{hint}; {_DO_NOT_DELETE}", names=names, as_one=True)
    stray: list[str] = []
    for file in files.orphans:
        if _CONSOLIDATED.fullmatch(file) and not files.scan(file).specs.keys() & files.specs.keys():
            actual = "the file is a second copy of the weights in Mistral's own format"
            hint = "check that it has the same weights: programs for Mistral's format load it, and this check does not"
            yield Issue(_EXPECTED, actual, hint, file=file, severity="warning")
        elif files.index is None or file == SINGLE:
            yield _orphan(files, file)
        else:
            stray.append(file)
    if stray:
        them = f"{stray[0]} and {len(stray) - 1} more files have" if stray[1:] else "the file has"
        actual = f"{them} no tensor of the index, so loaders ignore them"
        actual = f"{actual}; {_newest(files.root, [*files.shards, *stray])}"
        hint = f"restore the index if these files belong to this save, or move them elsewhere; {_DO_NOT_DELETE}"
        yield Issue(_EXPECTED, actual, hint, file="" if stray[1:] else stray[0], count=len(stray))


def _orphan(files: HfFiles, file: str) -> Issue:
    """A file that the index does not name, or next to model.safetensors, and that some reader loads.

    Source: transformers `modeling_utils.py` (`_get_resolved_checkpoint_files`) and SGLang `weight_utils.py`
    (`filter_duplicate_safetensors_files`).
    """
    newest = _newest(files.root, [*files.shards, file])
    if files.index is None:
        # SGLang leaves out a consolidated.safetensors if it is the only other file.
        reader = "vLLM" if file == "consolidated.safetensors" and len(files.orphans) == 1 else "SGLang"
        actual = f"{reader} reads {file} too, but transformers reads only {SINGLE}; {newest}"
        expected, hint = f"only {SINGLE}, since there is no index", f"move one of the files elsewhere; {_DO_NOT_DELETE}"
        return Issue(expected, actual, hint, file=file)
    actual = f"transformers reads {SINGLE}, but SGLang reads the shards of {INDEX}; {newest}"
    hint = f"move the unwanted set elsewhere ({SINGLE}, or the shards with their index); {_DO_NOT_DELETE}"
    return Issue("one set of weights", actual, hint, file=file)


def _newest(root: Path, files: list[str]) -> str:
    """The last modified of these files, and its time."""
    times = {file: (root / file).stat().st_mtime for file in files if (root / file).exists()}
    last = max(times, key=lambda file: times[file])
    when = datetime.fromtimestamp(times[last], UTC).isoformat(" ", "seconds").removesuffix("+00:00")
    return f"last modified: {last} ({when} UTC)"


def _has_tower(subject: Subject) -> None:
    only_hf(subject)
    try:
        config = raw_config_of(subject)
        if not family_of(config).towers(config):
            raise NotApplicable("the model of config.json has no vision tower")
    except CkptkitError:
        raise NotApplicable("config.json is missing or cannot be used (CK101)") from None


@check("CK730", applies_to=_has_tower)
def towers_stored(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """A tensor of each part (tower, projector), and every Linear layer of each numbered block of a tower."""
    config = raw_config_of(subject)
    names = {**names_of(subject), **(subject.hf_files.index or {})}
    result.compared(len(names))
    if (spelling := spelling_of(subject)) and any(name.startswith(spelling.towers) for name in names):
        raise CannotCheck(f"not run because names of the tower begin with {spelling.towers[0]}", "CK104")
    expected = f"stored, because SGLang, vLLM and transformers build it for {family_of(config).class_of(config)}"
    yield Issue(expected, "in no shard", names=lost_towers(config, names))


@dataclass(frozen=True)
class Mismatch:
    """A usable config.json and the names of all tensors, stored or listed."""

    config: Mapping[str, Any]
    names: Collection[str]

    @cached_property
    def _dims(self) -> ModelDims:
        return dims_of(self.config)

    @cached_property
    def _class(self) -> str:
        return family_of(self.config).class_of(self.config)

    @cached_property
    def _layers(self) -> frozenset[int]:
        return frozenset(layers_of(self.names))

    @cached_property
    def _mtp(self) -> frozenset[int]:
        """Numbers of layers for multi-token prediction that are stored as layers after the last."""
        beyond = (name for name in self.names if (layer_of(name) or 0) >= self._dims.layers)
        return frozenset(layer_of(name) or 0 for name in beyond if _MTP_PARTS.search(name))

    @cached_property
    def _experts(self) -> int:
        """The largest number of experts among the names."""
        return max((int(match[1]) + 1 for name in self.names if (match := EXPERT.search(name))), default=0)

    def _stated(self, *keys: str) -> str:
        """The values of those of these keys that config.json has, or that it lacks the first one."""
        text = {**self.config, **language_part(self.config)}
        found = [f"{key} is {text[key]!r:.60}" for key in keys if text.get(key) is not None]
        return f"{' and '.join(found)} in config.json" if found else f"config.json has no {keys[0]}"

    def _is_mtp(self, name: str) -> bool:
        return MTP_LAYER.match(name) is not None or name.startswith("mtp.") or layer_of(name) in self._mtp

    def why_unexpected(self, name: str) -> str:
        """The hint for a tensor that config.json does not promise."""
        layer, expert, dims = layer_of(name), EXPERT.search(name), self._dims
        if _HEAD.fullmatch(name):
            return f"{self._class} has no such head: {_NAME_ITS_CLASS}, or save only the language model"
        if _TOWER.match(name):
            return f"{self._class} has no tower: take config.json of the multimodal release, or remove these tensors"
        if self._is_mtp(name):
            return f"{self._stated(*_MTP_KEYS)}: set it to the number of stored multi-token prediction layers"
        if layer is not None and layer >= dims.layers:
            return f"{self._stated('num_hidden_layers')}, but layer {max(self._layers)} is stored: restore config.json"
        if expert and int(expert[1]) >= dims.experts > 0:
            return f"{self._stated(*_EXPERT_KEYS)}, but {self._experts} experts are stored: restore config.json"
        if layer is not None and ".mlp." in name and dims.experts:
            kind = "a dense layer" if layer in dims.dense else "a layer with experts"
            return f"compare config.json with the release: it makes this layer {kind} ({self._stated(*_KIND_KEYS)})"
        if name.endswith("bias"):
            keys = [key for key in language_part(self.config) if "bias" in key] or ["attention_bias"]
            return f"compare config.json with the release: {self._class} has no such bias ({self._stated(*keys)})"
        return f"compare the name, model_type and architectures with the release: {self._class} has no such tensor"

    def why_missing(self, name: str) -> str:
        """The hint for a tensor that config.json promises and no file has."""
        layer, expert, dims = layer_of(name), EXPERT.search(name), self._dims
        if name.endswith(_OUTPUT) and layer is None:
            if (head := next((name for name in self.names if _HEAD.fullmatch(name)), None)) is not None:
                return f"{_NAME_ITS_CLASS}: {head} is stored instead, but architectures is {self._class}"
            fix = "set it to true if the output layer is the embedding; else convert or download the tensor again"
            return f"{self._stated('tie_word_embeddings')}: {fix}"
        numbered = MTP_LAYER.match(name) is not None or (layer is not None and layer >= dims.layers)
        if numbered and not any(map(self._is_mtp, self.names)):
            return f"{self._stated(*_MTP_KEYS)}, but no such layer is stored: set it to 0, or {_AGAIN}"
        if layer is not None and not numbered and layer > max(self._layers, default=-1):
            stored = max(self._layers, default=-1) + 1
            fix = "convert or download the other layers again, or restore config.json"
            return f"{self._stated('num_hidden_layers')}, but {stored} layers are stored: {fix}"
        if expert and int(expert[1]) >= self._experts > 0:
            return f"{self._stated(*_EXPERT_KEYS)}, but {self._experts} experts are stored: restore config.json"
        return _AGAIN
