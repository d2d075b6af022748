"""CK141 to CK144: an EAGLE draft model is complete, its token tables agree, and it fits its target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.converters.config.values import integer
from ckptkit.converters.draft import EMBEDDING, FUSION, TOKENS, USED, Draft, draft_of, is_draft, target_of
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.reader import HfCheckpoint, read_config
from ckptkit.quant.engines.drafts import has_class, has_random_head, missing_biases, registries
from ckptkit.verify.core.check import CannotCheck, CheckResult, Issue, NotApplicable, Subject, check, once, warning_if
from ckptkit.verify.evidence.extremes import same_bytes
from ckptkit.verify.evidence.plain import plain
from ckptkit.verify.quirks import quirk

if TYPE_CHECKING:
    from torch import Tensor

_CONFIG = "config.json"


@once
def draft_model(subject: Subject) -> Draft:
    """The draft model's config. Raises CkptkitError as `draft_of`."""
    return draft_of(read_config(subject.path))


@once
def draft_files(subject: Subject) -> HfCheckpoint:
    """The draft model's files. Raises CkptkitError if they cannot be read."""
    return HfCheckpoint(subject.path)


@once
def draft_specs(subject: Subject) -> Mapping[str, TensorSpec]:
    """The tensors under the names of the engines' classes; each spec has the stored name."""
    specs = draft_files(subject).specs
    return {own: specs[name] for own, name in draft_model(subject).names(specs).items()}


@check("CK141", gate=True)
def tensors_of_its_class(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Files are complete, names and shapes fit config.json. Raises UnsupportedError for unsupported draft models."""
    try:
        draft, specs = draft_model(subject), draft_specs(subject)
        shapes = draft.shapes()
    except UnsupportedError:
        raise
    except CkptkitError as error:
        yield Issue("a draft model with readable files", error.message, error.hint or "")
        return
    result.compared(len(specs))
    lost = [name for name in shapes if name not in specs and draft.needs(name)]
    yield Issue("stored, because the model's class requires it", "in no shard", names=lost)
    unknown = [spec.name for name, spec in specs.items() if name not in shapes]
    hint = "rename the tensor as in the class: engines skip an unknown name or stop"
    yield Issue("a tensor of the draft model's class", "the class has no tensor of this name", hint, names=unknown)
    for name, spec in specs.items():
        if name in shapes and spec.shape != shapes[name]:
            states = f" ({draft.states} hidden states of a target of width {draft.target_hidden})"
            expected = f"shape {list(shapes[name])} by {_CONFIG}{states * (name == FUSION and draft.version == 3)}"
            yield Issue(expected, f"shape {list(spec.shape)}", names=[spec.name])
    if has_random_head(draft, specs) and (known := quirk("sglang", "draft-head")) is not None:
        actual = f"no output layer is stored, but draft_vocab_size is {draft.draft_vocabulary}: {known.message}"
        hint = "store the output layer, or remove draft_vocab_size from config.json, so that SGLang uses the target's"
        expected, severity = "the output layer that draft_vocab_size requires", warning_if(subject.not_for_sglang)
        yield Issue(expected, actual, hint, file=_CONFIG, severity=severity)
    for expected, actual, hint in missing_biases(draft, specs):
        yield Issue(expected, actual, hint, file=_CONFIG, severity="warning")
    for engine, registry in registries().items():
        if not has_class(engine, draft):
            result.note(f"{registry.release} has no class {draft.name}")


@check("CK142")
def tables_agree(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """d2t + i are different tokens of the target, and t2d is true for these only."""
    draft, specs = draft_model(subject), draft_specs(subject)
    stored = {own: specs[own].name for own in (TOKENS, USED) if own in specs}
    if not stored:
        raise NotApplicable("the draft model has no token tables, because its tokens are those of the target")
    read = draft_files(subject).read([*stored.values()])
    result.compared(len(stored), nbytes=sum(specs[own].nbytes for own in stored))
    tables = {own: read[name] for own, name in stored.items()}
    yield from _table_faults(draft, tables, stored)
    if TOKENS in tables and draft.draft_vocabulary < draft.vocabulary and not bool(tables[TOKENS].any()):
        actual = f"all zero, so its tokens are the first {draft.draft_vocabulary} of the target"
        yield Issue("d2t of the draft model's training", actual, names=[stored[TOKENS]], severity="warning")


def _table_faults(draft: Draft, tables: Mapping[str, Tensor], stored: Mapping[str, str]) -> Iterator[Issue]:
    """Faults of the tables; `stored` are their names on disk."""
    import torch

    used = tables.get(USED)
    if used is not None and (count := int(used.bool().sum())) != draft.draft_vocabulary:
        size = draft.draft_vocabulary
        yield Issue(f"{size} true entries (draft_vocab_size)", f"{count} true entries", names=[stored[USED]])
    if (shift := tables.get(TOKENS)) is None:
        return
    if shift.is_floating_point() or shift.dtype == torch.bool:
        yield Issue("an integer dtype", f"dtype {str(shift.dtype).removeprefix('torch.')}", names=[stored[TOKENS]])
        return
    shifts = shift.long()
    tokens = shifts + torch.arange(shifts.numel())
    outside, twice = _count_wrong(tokens, draft.vocabulary)
    if outside or twice:
        is_ids = not any(_count_wrong(shifts, draft.vocabulary))
        hint = "subtract i from entry i: the table contains token ids, not distances" * is_ids
        expected = f"different tokens d2t[i] + i from 0 to {draft.vocabulary - 1}"
        yield Issue(expected, f"{outside} are outside, {twice} are repeated", hint, names=[stored[TOKENS]])
    elif used is not None:
        by_d2t = torch.zeros(draft.vocabulary, dtype=torch.bool)
        by_d2t[tokens] = True
        if odd := (by_d2t != used.bool()).nonzero().flatten().tolist():
            actual = f"{len(odd)} entries are wrong, the first one is that of token {odd[0]}"
            yield Issue("true for the tokens of d2t, false for others", actual, names=[stored[USED]])


def _count_wrong(tokens: Tensor, vocabulary: int) -> tuple[int, int]:
    """The number of invalid tokens, and of repeated ones."""
    return int(((tokens < 0) | (tokens >= vocabulary)).sum()), tokens.numel() - len(set(tokens.tolist()))


@check("CK143")
def weights_are_numbers(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """No NaN, no infinity, and no tensor of zeros, except biases."""
    for own, spec in draft_specs(subject).items():
        if own in (TOKENS, USED):
            continue
        tensor = draft_files(subject).read([spec.name])[spec.name]
        result.compared(nbytes=spec.nbytes)
        if not bool(tensor.isfinite().all()):
            yield Issue("finite numbers", "NaN or infinity", names=[spec.name])
        if not own.endswith(".bias") and not bool(tensor.any()):
            yield Issue("weights that are not zero", "all zero", names=[spec.name])


@check("CK144", needs=("source",))
def fits_its_target(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Width, vocabulary and layers in config.json; the copy of the embedding, value by value."""
    draft, source = draft_model(subject), subject.source_path or Path()
    config = read_config(source)
    if is_draft(config):
        raise CannotCheck(f"--source {source} is a draft model: pass its target, or use `ckptkit diff`")
    target = target_of(config)
    result.compared(3)
    if draft.target_hidden != target.hidden:
        key = "target_hidden_size" if draft.config.get("target_hidden_size") is not None else "hidden_size"
        yield Issue(f"{key} = {target.hidden}, as in the target", f"{key} = {draft.target_hidden}", file=_CONFIG)
    if draft.vocabulary != target.vocabulary:
        wanted, given = (f"vocab_size = {one.vocabulary}" for one in (target, draft))
        yield Issue(f"{wanted}, as in the target", given, file=_CONFIG)
    positions = integer(draft.config, "max_position_embeddings", target.positions)
    if positions < target.positions:
        actual = f"{positions}: vLLM precomputes RoPE for no more, and rejects almost all drafts at later positions"
        hint = "write the target's value, on which no weight depends"
        expected = f"max_position_embeddings {target.positions}, as in the target"
        yield Issue(expected, actual, hint, file=_CONFIG, severity="warning")
    # SGLang 0.5.16 reads the outputs of all layers but the last; vLLM 0.26 reads inputs, and the last layer's output.
    last = target.layers - 2 if draft.reads_outputs else target.layers
    if odd := [one for one in draft.layer_ids or () if not 0 <= one <= last]:
        expected = f"eagle_aux_hidden_state_layer_ids from 0 to {last}, as the target has {target.layers} layers"
        yield Issue(expected, f"the list has {odd}", "restore the list of the training run", file=_CONFIG)
    spec = draft_specs(subject).get(EMBEDDING)
    if spec is None or draft.target_hidden != draft.hidden:
        return  # no copy of the target's embedding
    base = plain(source)
    names = [name for name in base.specs if name.endswith(EMBEDDING) and base.specs[name].shape == spec.shape]
    if len(names) != 1:
        return
    result.compared(nbytes=spec.nbytes)
    copy, original = draft_files(subject).read([spec.name])[spec.name], base.read(names)[names[0]]
    if not same_bytes(copy.to(original.dtype), original):
        hint = "remove this copy from the draft model: SGLang uses the target's embedding, vLLM this one"
        yield Issue("the target's values", "other values", hint, names=[spec.name], severity="warning")
