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
from ckptkit.verify.checks.quantization.quantization_config import in_second_format, undeclared_issue, undeclared_of
from ckptkit.verify.core.check import Tally, check
from ckptkit.verify.core.issue import Issue, warning_if
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.expected import (
    CACHE_SCALE,
    Expected,
    expected_of,
    remarks_of,
    spelling_of,
    stated_config_of,
    tied_head_of,
    usable_config,
)
from ckptkit.verify.evidence.files import HfFiles
from ckptkit.verify.evidence.folding import EXPERT, LAYER, MTP_LAYER, by_key, layer_of, layers_of


@check("CK104", gate=True, explained_by=("CK103", "CK110"))
def same_names(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Index, headers and config name the same tensors (Megatron: `.metadata` and config); no duplicates or orphans."""
    specs = names_of(subject, listed=True)
    config = usable_config(subject)
    expected = expected_of(subject)
    tally.compared(len(specs) or len(subject.hf_files.unknown))
    if subject.is_hf:
        yield from leftovers(subject.hf_files)
    yield from renamed_layers(subject)
    yield from _three_way(subject, specs, expected)
    for text in remarks_of(subject) if config else ():
        tally.note(text)
    if subject.is_hf and (tied := tied_head_of(subject)) and tied[0] in specs:
        tally.note(
            f"{tied[0]} is stored although tie_word_embeddings is true; only its values show whether it repeats "
            f"{tied[1]} (CK211)"
        )
    tally.facts["tensors per layer"] = layer_table(subject.kinds, dict(config) if config else None)
    if expected is None:
        yield from _uneven(specs)


def _three_way(subject: Subject, specs: Mapping[str, TensorSpec], expected: Expected | None) -> Iterator[Issue]:
    files = subject.hf_files if subject.is_hf else None
    index = files.index if files else None
    unknown = files.unknown if files else frozenset()
    optional = expected.optional if expected else frozenset()
    where = "" if index is None else INDEX
    spelling, promises = spelling_of(subject), expected.shapes if expected else {}
    known: frozenset[str] = frozenset()
    if (change := renamed_of(subject)) is not None:
        known = change.promised.union(change.stored)
        wanted = f"names such as {min(change.promised)}"
        yield Issue(wanted, change.change, change.hint, names=change.stored, file=where, together=True)
    if undeclared := undeclared_of(subject):
        known |= frozenset(undeclared.values())
        yield undeclared_issue(undeclared)
    known |= in_second_format(subject)
    config = usable_config(subject)
    why = Mismatch(config, {**specs, **(index or {})}) if config else None
    every = [known.keys() for known in (specs, index, expected.shapes if expected else None) if known is not None]
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
    """What should be, what is and the next move, for a name that is not everywhere that it should be."""
    if not promised:
        if PACKED in name or name.endswith((SCALE, SHAPE)):
            return (
                "no packed tensor, by config.json",
                "stored, and config.json does not say that it is packed",
                f"{describe_quantization(subject.hf_files.config)}: restore the release's tensors, or quantize again",
            )
        if CACHE_SCALE.fullmatch(name):
            return (
                "no scale of a quantized cache, by config.json",
                "stored, and config.json has no kv_cache_scheme",
                "transformers and SGLang drop it: restore kv_cache_scheme in quantization_config, or remove the scales",
            )
        place = "stored, and config.json does not promise it" if stored else "in the index, but in no shard"
        hint = (
            why.why_unexpected(name)
            if why and stored
            else "restore the index: no file holds the tensors that it lists there"
        )
        return "only tensors that config.json promises", place, hint
    if not stored:
        lost = indexed and listed
        place = ("in no shard" if subject.is_hf else "not in .metadata") + ", though the index lists it" * lost
        hint = why.why_missing(name) if why and not lost else "convert or download it again; loading leaves it random"
        return "stored, as config.json promises" if promised else "stored", place, hint
    hint = "restore the index: a loader that follows it leaves this tensor random"
    return "listed in the index", "in a shard, but not in the index", hint


_ALONE = "model."  # what a class of the language model alone calls its layers


def renamed_layers(subject: Subject) -> Iterator[Issue]:
    """One issue for all tensors of the layers, a warning where transformers renames them while it loads."""
    if (found := spelling_of(subject)) is None:
        return
    config = stated_config_of(subject)
    family, count = family_of(config), sum(one.startswith(found.found) for one in subject.specs)
    rename = f"rename the tensors to {found.expected}* (and in the index)"
    if found.renamed_on_load:
        whose = "the multimodal class uses"
        hint = "transformers and newer releases of vLLM rename them while they load, SGLang does not: take config.json "
        hint += f"of the multimodal release with its vision tower, or {rename}"
    elif not family.towers(config):
        whose, hint = "a multimodal class uses", f"take config.json of the multimodal release, or {rename}"
    elif found.found == _ALONE:
        whose = "a class of the language model alone uses"
        hint = f"take config.json of the language model alone, or {rename}"
    else:
        whose = "transformers uses internally since 4.52"
        hint = "transformers loads both, SGLang the names of the release: save with save_original_format=True, or "
        hint += rename
    expected = f"{found.expected or 'layers.'}*, the layer names of {family.class_of(config)} in config.json"
    actual, severity = f"{found.found}*, which {whose}: {count} tensors", warning_if(found.renamed_on_load)
    yield Issue(expected, actual, hint, file="config.json", severity=severity)


# The parts of a quantized weight: some layers may be left unquantized.
_PACKED_PART = re.compile(r"\.weight_\w+$")


def layer_table(kinds: Iterable[Sequence[str]], config: dict[str, object] | None) -> list[str]:
    """`dense layers {0..1}: 14 tensors each`, a line for all layers of one kind and count.

    `kinds` are names that differ in numbers only, together.
    """
    dims = dims_of(config) if config else None
    counts: Counter[tuple[bool, int]] = Counter()
    for names in kinds:
        for mtp, pattern in ((False, LAYER), (True, MTP_LAYER)):
            if match := pattern.match(names[0]):
                start = match.start(1)  # in all of them, as they differ in numbers only
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
    """Without a usable config: layers that are as several others are, less some tensors; experts that lack some in all.

    What two layers or more have in common is a kind of layer: models mix full and linear attention, dense layers and
    experts, and some (Gemma 4) use keys as values, or those of an earlier layer.
    """
    parts: dict[int, set[str]] = defaultdict(set)
    experts: dict[str, set[int]] = defaultdict(set)
    for name in (_PACKED_PART.sub(".weight", name) for name in names):
        if match := LAYER.match(name):
            parts[int(match[1])].add(name[match.end() :])
        if match := EXPERT.search(name):
            experts[name[match.end() :]].add(int(match[1]))
    counts = Counter(map(frozenset, parts.values()))
    for layer, found in parts.items():
        fuller = [kind for kind, count in counts.items() if count > 1 and found < kind]
        if counts[frozenset(found)] == 1 and fuller:
            lost = [f"layers.{layer}.{name}" for name in sorted(min(fuller, key=len) - found)]
            yield Issue("there, as in the other layers of this kind", "missing", names=lost)
    for part, numbers in experts.items():
        lost = [f"experts.{expert}.{part}" for expert in sorted(set().union(*experts.values()) - numbers)]
        yield Issue("there, as in the other experts", "missing", names=lost)


# What Mistral publishes beside the shards with HF's names: all weights in a format of its own.
_CONSOLIDATED = re.compile(r"consolidated(-\d+-of-\d+)?\.safetensors")
_ONLY = "only files that the index names"
_ASIDE = "delete neither before `ckptkit diff` has compared them: one may be the only copy of what was trained"


def leftovers(files: HfFiles) -> Iterator[Issue]:
    """Tensors that stand in two shards, and weight files that the index does not name."""
    index = files.index or {}
    for homes, names in by_key((tuple(found), name) for name, found in files.twice.items()).items():
        # Which copies the index names, and what else is only in the other files.
        named = sorted({index[name] for name in names if name in index})
        home = named[0] if len(named) == 1 and named[0] in homes else None
        actual = f"stored in {' and '.join(homes)}; the index names {home or ' and '.join(named) or 'neither'}"
        others = [file for file in homes if file != home]
        needed = [file for file in others if files.shards[file].specs.keys() - files.twice.keys()]
        hint = (
            f"move {' and '.join(others)} elsewhere, and let the index name {home} for the tensors that it lists there"
        )
        if home is None:
            hint = "let the index name one of them for all of these tensors, and write the other without them"
        elif needed:
            hint = f"write {needed[0]} again without these tensors: others are only there"
        actual = f"{actual}; {_newest(files.root, [*homes])}"
        yield Issue("each tensor in one shard", actual, f"{hint}; {_ASIDE}", names=names, together=True)
    stray: list[str] = []
    for file in files.orphans:
        if _CONSOLIDATED.fullmatch(file) and not files.scan(file).specs.keys() & files.specs.keys():
            actual = "a second copy of the weights, under Mistral's own names"
            hint = "readers of HF names ignore it, and it is not checked here; readers of Mistral's own format load it"
            yield Issue(_ONLY, actual, hint, file=file, severity="warning")
        elif files.index is None or file == SINGLE:
            yield _orphan(files, file)
        else:
            stray.append(file)
    if stray:
        whose = f"{stray[0]} and {len(stray) - 1} more: the index names none of their" if stray[1:] else ""
        actual = f"{whose or 'the index names none of its'} tensors, and loaders follow it"
        hint = f"restore the index if it belongs to this save, or move it elsewhere; {_ASIDE}"
        actual = f"{actual}; {_newest(files.root, [*files.shards, *stray])}"
        yield Issue(_ONLY, actual, hint, file="" if stray[1:] else stray[0], count=len(stray))


def _orphan(files: HfFiles, file: str) -> Issue:
    """A file that the index does not name, or beside model.safetensors, and that some reader takes all the same.

    Source: transformers `modeling_utils.py` (`_get_resolved_checkpoint_files`) and SGLang `weight_utils.py`
    (`filter_duplicate_safetensors_files`).
    """
    newest = _newest(files.root, [*files.shards, file])
    if files.index is None:
        # SGLang leaves out a consolidated.safetensors that is alone beside it.
        reader = "vLLM" if file == "consolidated.safetensors" and len(files.orphans) == 1 else "SGLang"
        actual = f"{reader} reads {file} too, transformers {SINGLE} alone; {newest}"
        hint = f"move one of them elsewhere; {_ASIDE}"
        return Issue(f"{SINGLE} alone, since there is no index", actual, hint, file=file)
    actual = f"transformers reads {SINGLE}, SGLang the shards of {INDEX}; {newest}"
    hint = f"move the one that is not meant elsewhere ({SINGLE}, or the shards with their index); {_ASIDE}"
    return Issue("one set of weights", actual, hint, file=file)


def _newest(root: Path, files: list[str]) -> str:
    """Which of these files was changed last, and when."""
    times = {file: (root / file).stat().st_mtime for file in files if (root / file).exists()}
    last = max(times, key=lambda file: times[file])
    when = datetime.fromtimestamp(times[last], UTC).isoformat(" ", "seconds").removesuffix("+00:00")
    return f"last modified: {last} ({when} UTC)"


def _has_tower(subject: Subject) -> None:
    only_hf(subject)
    try:
        config = stated_config_of(subject)
        towers = family_of(config).towers(config)
    except CkptkitError:
        raise NotApplicable("there is no usable config.json (CK101)") from None
    if not towers:
        raise NotApplicable("the class of config.json is a language model alone")


@check("CK730", applies_to=_has_tower)
def towers_stored(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """A tensor of each part (tower, projector), and every Linear layer of each numbered block of a tower."""
    config = stated_config_of(subject)
    names = {**names_of(subject), **(subject.hf_files.index or {})}
    tally.compared(len(names))
    if (spelling := spelling_of(subject)) and any(name.startswith(spelling.towers) for name in names):
        raise CannotCheck(f"not run because the tower is stored under {spelling.towers[0]}*", "CK104")
    name = family_of(config).class_of(config)
    expected = f"stored, since SGLang, vLLM and transformers build it for {name}"
    yield Issue(expected, "in no shard", names=lost_towers(config, names))


_AGAIN = "convert or download it again; loading leaves it random"
# Heads of classes that are no language model: transformers' classifiers, TRL's and verl's value models, reward models.
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
        """Numbers of layers for multi-token prediction that are stored as those after the last."""
        beyond = (name for name in self.names if (layer_of(name) or 0) >= self._dims.layers)
        return frozenset(layer_of(name) or 0 for name in beyond if _MTP_PARTS.search(name))

    @cached_property
    def _experts(self) -> int:
        """How many experts the names have at most."""
        return max((int(match[1]) + 1 for name in self.names if (match := EXPERT.search(name))), default=0)

    def _stated(self, *keys: str) -> str:
        """Those of these keys that config.json has, with their values; the first of them where it has none."""
        text = {**self.config, **language_part(self.config)}
        found = [f"{key} is {text[key]!r:.60}" for key in keys if text.get(key) is not None]
        return f"{' and '.join(found)} in config.json" if found else f"config.json has no {keys[0]}"

    @cached_property
    def _head(self) -> str | None:
        """The name of a head that no language model has."""
        return next((name for name in self.names if _HEAD.fullmatch(name)), None)

    def _is_mtp(self, name: str) -> bool:
        return MTP_LAYER.match(name) is not None or name.startswith("mtp.") or layer_of(name) in self._mtp

    def why_unexpected(self, name: str) -> str:
        """What to do about a tensor that config.json does not promise."""
        layer, expert, dims = layer_of(name), EXPERT.search(name), self._dims
        if _HEAD.fullmatch(name):
            return (
                f"{self._class} has no such head: name the class of this value, reward or classification model in "
                "architectures, or save its language model alone"
            )
        if _TOWER.match(name):
            return f"{self._class} has no such part: take config.json of the multimodal release, or leave these out"
        if self._is_mtp(name):
            return f"{self._stated(*_MTP_KEYS)}: set the number of multi-token prediction layers that are stored"
        if layer is not None and layer >= dims.layers:
            return f"{self._stated('num_hidden_layers')}, and layer {max(self._layers)} is stored: restore config.json"
        if expert and int(expert[1]) >= dims.experts > 0:
            return f"{self._stated(*_EXPERT_KEYS)}, and {self._experts} experts are stored: restore config.json"
        if layer is not None and ".mlp." in name and dims.experts:
            kind = "a dense layer" if layer in dims.dense else "a layer with experts"
            return f"config.json makes this layer {kind}: {self._stated(*_KIND_KEYS)}; compare with the release"
        if name.endswith("bias"):
            keys = [key for key in language_part(self.config) if "bias" in key] or ["attention_bias"]
            return f"{self._class} has no such bias by config.json: {self._stated(*keys)}; compare with the release"
        return f"{self._class} has no tensor of this name: compare it, model_type and architectures with the release"

    def why_missing(self, name: str) -> str:
        """What to do about a tensor that config.json promises and no file has."""
        layer, expert, dims = layer_of(name), EXPERT.search(name), self._dims
        if name.endswith(_OUTPUT) and layer is None:
            if self._head is not None:
                return (
                    f"{self._head} is stored instead: name the class of this value, reward or classification model in "
                    f"architectures, which has {self._class}"
                )
            return (
                f"{self._stated('tie_word_embeddings')}: set it to true if the output layer is the embedding, else "
                "convert or download the tensor again"
            )
        numbered = MTP_LAYER.match(name) is not None or (layer is not None and layer >= dims.layers)
        if numbered and not any(map(self._is_mtp, self.names)):
            return f"{self._stated(*_MTP_KEYS)}, and no such layer is stored: set it to 0, or {_AGAIN}"
        if layer is not None and not numbered and layer > max(self._layers, default=-1):
            stored = max(self._layers, default=-1) + 1
            return (
                f"{self._stated('num_hidden_layers')}, and {stored} layers are stored: convert or download the others "
                "again, or restore config.json"
            )
        if expert and int(expert[1]) >= self._experts > 0:
            return f"{self._stated(*_EXPERT_KEYS)}, and {self._experts} experts are stored: restore config.json"
        return _AGAIN
