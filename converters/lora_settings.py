"""Reads adapter_config.json of a LoRA adapter like PEFT: all of its fields, and the modules that they select.

Source: peft 0.21.2, `LoraConfig`, `LoraLayer.update_layer` (initializations), `check_target_module_exists`,
`BaseTuner._inject_parameters`, `get_pattern_key`; `lora_dtype` and `lorap_*`: ms-swift's `LoRAConfig`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.converters.config.values import flag, integer, number
from ckptkit.core.errors import CkptkitError, DamagedError, UnsupportedError
from ckptkit.core.printable import shortened
from ckptkit.formats.hf.adapter import ADAPTER_CONFIG, AdapterFiles
from ckptkit.formats.hf.shard import Fault
from ckptkit.quant.patterns import REGEX, Match, matcher

RULES_OF = "0.21.2"  # the release of PEFT that the rules here follow
ROOT = "base_model.model."  # PEFT's prefix of every name
BY_HAND = "merge the adapter with the program that trained it"
FACTOR = re.compile(r"(.+?)(?:\.base_layer)*\.lora_(embedding_)?(A|B|magnitude_vector)(?:\.default)?(?:\.weight)?")
# Names that PEFT loads; only blocks of experts are wrapped twice. Older releases store magnitudes without `.weight`.
# Source: `_remap_adapter_state_dict_for_load`, run.
_LOADED = re.compile(
    r"(?:.+\.experts(?:\.base_layer)*|(?:(?!\.base_layer).)+)"
    r"\.lora_(?:[AB](?:\.default)?\.weight|embedding_[AB]|magnitude_vector(?:\.weight)?)"
)
HARMLESS, APPLIED = "harmless", "applied"
# Fields of LoraConfig: HARMLESS (no effect on a merge), APPLIED (like PEFT), or why adapters that set it are rejected.
FIELDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"), APPLIED
    ),
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"), APPLIED),
    **dict.fromkeys(("target_parameters", "modules_to_save", "init_lora_weights", "ensure_weight_tying"), APPLIED),
    **dict.fromkeys(("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"), HARMLESS),
    **dict.fromkeys(("inference_mode", "lora_dropout", "megatron_core", "qalora_group_size"), HARMLESS),
    # Read only if `init_lora_weights` names them, or when the adapter runs.
    **dict.fromkeys(("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"), HARMLESS),
    **dict.fromkeys(("lora_dtype", "lorap_lr_ratio", "lorap_emb_lr"), HARMLESS),  # ms-swift's, of its optimizer
    "bias": "the adapter trains biases of the base, which ckptkit does not merge",
    "lora_bias": "lora_B has a bias, which ckptkit does not merge",
    "fan_in_fan_out": "the base stores weights as [inputs, outputs], which ckptkit does not merge",
    "megatron_config": "the adapter is for Megatron's layers",
    "trainable_token_indices": "the adapter trains single rows of the embedding, which ckptkit does not merge",
    "layer_replication": "the adapted model repeats layers of the base",
    "alora_invocation_tokens": "the adapter acts only after an invocation sequence, which no merged weight can",
    "arrow_config": "the adapter is chosen among several for each token, which no merged weight can",
    "use_qalora": "QALoRA changes the zero points of quantized weights",
    "use_bdlora": "the factors are block-diagonal and stored as blocks",
    "kasa_config": "KaSA removes singular values from the base before the merge",
    "monteclora_config": "MonteCLoRA samples its factors at random",
    "velora_config": "VeLoRA's layers are not supported",
}
# Initializations for which PEFT changes the base in training or loading, and the change.
_INITS: Mapping[str, str] = {
    **dict.fromkeys(("pissa", "olora", "corda"), "PEFT subtracts the initial factors from the base, engines do not"),
    "lora_ga": "PEFT subtracted the initial factors from the base before training",
    "loftq": "PEFT quantizes the base, but engines do not",
}
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
_TO_PLAIN = (
    "save the trained adapter with save_pretrained(..., path_initial_model_for_weight_conversion=INITIAL_ADAPTER), "
    "which converts it to plain LoRA"
)
_UNSET: tuple[Any, ...] = (None, False, [], "none")
# PEFT 0.21's projections in a block of experts, including the names of transformers 4.
_LEAVES = {"gate_up_proj": ("gate_up_proj", "gate_proj", "up_proj", "w1", "w3"), "down_proj": ("down_proj", "w2")}
ROUTERS = (".gate", ".router")  # PEFT treats these as parameters, even if `target_modules` names them
_EMBEDDINGS = ("embed_tokens", "embeddings", "word_embeddings", "tok_embeddings")
_FIRST_NUMBER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")
_RESTORE = "restore this file from the training run"


@dataclass(frozen=True)
class PairName:
    """The module of a pair of factors, and the prefix of their names. `is_embedding`: they are `lora_embedding_*`."""

    module: str
    prefix: str
    is_embedding: bool


class LoraSettings:
    """The settings of a LoRA adapter. `is_dora`: each pair has a magnitude. `ties`: a complete embedding also replaces
    the output layer.

    Raises UnsupportedError for fields with effects that are not implemented, and DamagedError for values that PEFT
    rejects. `where`: the adapter, as shown to users. `accepted`: fields that are not rejected.
    """

    def __init__(self, files: AdapterFiles, where: str, accepted: Collection[str] = ()) -> None:
        self._config, self._where = files.config, f"{where}/{ADAPTER_CONFIG}"
        self._longest = max(map(len, files.specs), default=0)
        self._refuse_fields(accepted)
        self.ties = self._read(flag, "ensure_weight_tying", False)
        if self.ties and any(pair.is_embedding for pair in pairs_in(files.specs)):
            why = "embedding and output layer share one lora_A and lora_B, which ckptkit does not merge"
            raise UnsupportedError(f"{self._where}: ensure_weight_tying is True: {why}", BY_HAND)
        self.is_dora = self._read(flag, "use_dora", False)
        self._targets = self._names("target_modules")
        self._excluded = self._names("exclude_modules")
        self._parameters = frozenset(self._list("target_parameters"))
        self.replaced_modules = tuple(self._list("modules_to_save"))
        self._is_replaced = [
            self._matcher("modules_to_save", rf"(^|.*\.){one}($|\..*)") for one in self.replaced_modules
        ]
        self._layers = self._chosen_layers()
        self._in_layer = [_FIRST_NUMBER.match]
        if patterns := self._list("layers_pattern", allows_text=True):
            parts = (rf"(?:^|.*?\.){one}\.(?P<idx>\d+)\." for one in patterns)
            self._in_layer = [self._matcher("layers_pattern", part) for part in parts]  # type: ignore[misc]
        self._ranks, self._alphas = self._patterns("rank_pattern"), self._patterns("alpha_pattern")

    def _refuse_fields(self, accepted: Collection[str]) -> None:
        if (kind := self._config.get("peft_type")) != "LORA":
            raise UnsupportedError(f"{self._where}: peft_type {shortened(kind)} is not supported", BY_HAND)
        for key, value in self._config.items():
            why = APPLIED if key in accepted else FIELDS.get(key, "PEFT 0.21 has no such field; its effect is unknown")
            if why not in (HARMLESS, APPLIED) and value not in _UNSET and not (key not in FIELDS and not value):
                raise UnsupportedError(f"{self._where}: {key} is {shortened(value)}: {why}", BY_HAND)
        init = self._config.get("init_lora_weights", True)
        if init is None or isinstance(init, bool) or init in _PLAIN_INITS:
            return
        name = next((one for one in _INITS if isinstance(init, str) and init.lower().startswith(one)), None)
        why = _INITS[name] if name else "PEFT 0.21 has no initialization of this name"
        hint = _TO_PLAIN if name and name != "loftq" else BY_HAND
        raise UnsupportedError(f"{self._where}: init_lora_weights is {shortened(init)}: {why}", hint)

    def _damaged(self, what: str) -> DamagedError:
        return DamagedError(f"{self._where}: {what}", _RESTORE)

    def _list(self, key: str, *, allows_text: bool = False) -> list[str]:
        value = self._config.get(key)
        if value is None:
            return []
        if allows_text and isinstance(value, str):
            return [value] if value else []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._damaged(f"{key} is {shortened(value)}, not a list of names")
        return value

    def _names(self, key: str) -> frozenset[str] | Match | None:
        """Names of modules, or a function that matches an expression with a complete name."""
        value = self._config.get(key)
        if not isinstance(value, str):
            return frozenset(self._list(key)) if value is not None else None
        if key == "target_modules" and value.lower() == "all-linear":
            return _is_linear
        return self._matcher(key, rf"(?:{value})\Z")

    def _matcher(self, key: str, expression: str) -> Match:
        """Raises CkptkitError for an invalid expression, or one that could take hours."""
        try:
            return matcher(REGEX + expression, self._longest)
        except CkptkitError as error:
            raise CkptkitError(f"{self._where}: {key}: {error.message}", error.hint) from error

    def _chosen_layers(self) -> frozenset[int] | None:
        value = self._config.get("layers_to_transform")
        layers = [value] if type(value) is int else value
        if layers is not None and not (isinstance(layers, list) and all(type(one) is int for one in layers)):
            raise self._damaged(f"layers_to_transform is {shortened(value)}, not a list of layer numbers")
        if value is not None and isinstance(self._config.get("target_modules"), str):
            raise self._damaged("layers_to_transform is set, but PEFT rejects it if target_modules is an expression")
        if layers is None and self._config.get("layers_pattern"):
            raise self._damaged("layers_pattern is set, but PEFT rejects it without layers_to_transform")
        return frozenset(layers) if layers else None

    def _patterns(self, key: str) -> list[tuple[Match, Any]]:
        patterns = self._config.get(key, {})
        if not isinstance(patterns, dict):
            raise self._damaged(f"{key} is {shortened(patterns)}, not an object")
        return [(self._matcher(key, rf"(.*\.)?({name})$"), value) for name, value in patterns.items()]

    def scale_of(self, module: str) -> tuple[int, float]:
        """Rank and scale of a module. Raises CkptkitError for invalid values."""
        ranks = [value for match, value in self._ranks if match(module)]
        alphas = [value for match, value in self._alphas if match(module)]
        rank = self._read(integer, "rank_pattern", ranks[0]) if ranks else self._read(integer, "r", 8)
        alpha = self._read(number, "alpha_pattern", alphas[0]) if alphas else self._read(number, "lora_alpha", 8)
        if rank < 1:
            raise self._damaged(f"rank is {rank}, not positive")
        return int(rank), alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _read(self, read: Callable[[Mapping[str, Any], str, Any], Any], key: str, value: Any) -> Any:
        """A value of a pattern, or of a field with this default."""
        content = {key: value} if key.endswith("_pattern") else {key: self._config.get(key)}
        if key.endswith("_pattern") and value is None:
            raise self._damaged(f"{key} contains null")
        try:
            return read(content, key, value)
        except CkptkitError as error:
            raise self._damaged(error.message.removeprefix("config.json: ")) from error

    def exclusion_reason(self, module: str, leaf: str = "") -> str | None:
        """Why PEFT adds no pair to a module and drops the stored one, or None if it adds one.

        `leaf`: the projection for a pair of all experts of a layer, or "" if unknown.
        """
        names, parameters = list(_names_of(module, leaf)), [f"{module}.weight"]
        if any(_is_named(name, self._parameters) for name in (*names, *parameters)):
            return None
        reasons = [self._exclusion(name) for name in names]
        return None if None in reasons else reasons[0]

    def faults(self, pair: PairName, parts: Collection[str], leaf: str = "") -> Iterator[Fault]:
        """Why PEFT would not load a stored pair. The caller adds the tensors' names.

        `parts`: the stored ones of A, B and magnitude_vector. `leaf`: like in `exclusion_reason`.
        """
        if (why := self.exclusion_reason(pair.module, leaf)) is not None:
            yield Fault("factors of a module that PEFT adapts", f"{why} ({ADAPTER_CONFIG}): PEFT ignores its factors")
        if self.is_dora and "magnitude_vector" not in parts:
            yield Fault(
                f"lora_magnitude_vector, since use_dora is true ({ADAPTER_CONFIG})",
                "missing: PEFT uses the row norms of the base instead",
            )
        if not self.is_dora and "magnitude_vector" in parts:
            yield Fault(
                f"no lora_magnitude_vector, since use_dora is false ({ADAPTER_CONFIG})",
                "lora_magnitude_vector, which PEFT ignores",
            )
        own = pair.module.rpartition(".")[2]
        if pair.is_embedding and "embed" not in own:
            yield Fault("lora_A and lora_B, since this is not an embedding", "lora_embedding_*, which PEFT ignores")
        is_parameter = _is_named(f"{pair.module}.weight", self._parameters)
        if not pair.is_embedding and own in _EMBEDDINGS and not is_parameter:
            yield Fault("lora_embedding_A and lora_embedding_B, since this is an embedding", "lora_A: PEFT ignores it")

    def _exclusion(self, name: str) -> str | None:
        if self._excluded and _chooses(self._excluded, name):
            return f"{self._shown('exclude_modules')} excludes the module"
        if any(match(name) for match in self._is_replaced):
            return f"{self._shown('modules_to_save')} replaces the complete module"
        if self._targets is None or not _chooses(self._targets, name):
            key = "target_modules" if self._targets is not None or not self._parameters else "target_parameters"
            return f"{self._shown(key)} does not name the module"
        if self._layers is None or (isinstance(self._targets, frozenset) and name in self._targets):
            return None
        found: Any = next((match for one in self._in_layer if (match := one(name))), None)
        if found is not None and int(found["idx"]) in self._layers:
            return None
        pattern = f" with {self._shown('layers_pattern')}" if self._config.get("layers_pattern") else ""
        return f"{self._shown('layers_to_transform')}{pattern} excludes the module"

    def _shown(self, key: str) -> str:
        return f"{key} {shortened(self._config.get(key))}"


def corrected_name(name: str) -> str | None:
    """The name that PEFT would load for a factor that it drops under this name, or None if it loads this name."""
    match = FACTOR.fullmatch(name)
    if match is None or _LOADED.fullmatch(name):
        return None
    ending = "" if match[2] else ".weight"
    return f"{match[1]}.lora_{match[2] or ''}{match[3]}{ending}"


def pairs_in(names: Iterable[str]) -> dict[PairName, dict[str, str]]:
    """The stored names of A, B and magnitude_vector of each pair."""
    found: dict[PairName, dict[str, str]] = {}
    for name in names:
        if match := FACTOR.fullmatch(name):
            stem = PairName(match[1].removeprefix(ROOT), name[: match.start(3)], match[2] is not None)
            found.setdefault(stem, {})[match[3]] = name
    # PEFT names the magnitudes of an embedding like those of other modules.
    for stem in [stem for stem, parts in found.items() if stem.is_embedding and "magnitude_vector" not in parts]:
        other = PairName(stem.module, stem.prefix.removesuffix("embedding_"), is_embedding=False)
        if found.get(other, {}).keys() == {"magnitude_vector"}:
            found[stem] |= found.pop(other)
    return found


def idle_reason(files: AdapterFiles) -> str | None:
    """Why an adapter changes no weight, judged by its files only, or None. Reads factors until the first change.

    DoRA magnitudes and complete tensors need the base: see `Adapter.idle`.
    """
    pairs = pairs_in(files.specs)
    if not files.specs:
        return "no tensor is stored"
    if len(files.specs) > sum(len(parts) for parts in pairs.values()):
        return None
    if files.config.get("lora_alpha") == 0 and not files.config.get("alpha_pattern"):
        return f"lora_alpha is 0 ({ADAPTER_CONFIG})"
    zeros = set()
    for parts in pairs.values():
        found = {part for part, name in parts.items() if not bool(files.read([name])[name].any())}
        if parts.keys() != {"A", "B"} or not found:
            return None
        zeros.add("B" if "B" in found else "A")
    return "every lora_B is zero" if zeros == {"B"} else "lora_A or lora_B of every pair is zero"


def _is_linear(name: str) -> bool:
    """Whether `all-linear` includes a module of a language model: not the embedding or output layer."""
    return name.rpartition(".")[2] not in ("embed_tokens", "lm_head")


def _chooses(names: frozenset[str] | Match, name: str) -> bool:
    return _is_named(name, names) if isinstance(names, frozenset) else bool(names(name))


def _is_named(name: str, names: frozenset[str]) -> bool:
    """Whether one of the names equals this name or its suffix after a dot."""
    parts = name.split(".")
    return any(".".join(parts[at:]) in names for at in range(len(parts)))


def _names_of(module: str, leaf: str) -> Iterator[str]:
    """The module, and for all experts of a layer also the parameters of its block."""
    yield module
    block, dot, rest = module.partition(".experts")
    if not dot or rest[1:2].isdecimal():
        return
    block += dot
    own = leaf or rest.removeprefix(".")
    yield block
    leaves = _LEAVES.get(own, (own,)) if own else (name for names in _LEAVES.values() for name in names)
    yield from (f"{block}.{one}" for one in leaves)
