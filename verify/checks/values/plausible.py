"""CK212: compares weights with their siblings in the same checkpoint, without a source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from converters.hf_names import GATE_UP_DOWN
from converters.planner import dims_of
from converters.registry import family_of
from verify.check import Skip, Tally, check
from verify.checks.values.values import UNREAD, counted
from verify.evidence.expected import usable_config
from verify.evidence.reading import read_values
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.skip import Inapplicable
from verify.witnesses.loading.names import routers


def _named_otherwise(subject: Subject) -> str | None:
    other = subject.is_megatron and subject.source_path is None
    return (
        "a Megatron checkpoint is compared with its own siblings by HF names: give --source or export it"
        if other
        else None
    )


@check(
    "CK212",
    "weights look like their siblings",
    stage="values",
    needs=("sound headers",),
    explained_by=("CK202", "CK204", "CK205"),
    rationale="gate and up exchanged, a transposed square matrix or a router that was never loaded keep every name and "
    "shape. Training leaves structure in weights, which such a tensor lacks or has in another's place.",
    fix="Compare the named tensors with the release: `ckptkit verify CKPT --source RELEASE` compares every value. This "
    "is only a warning, since it rests on likeness alone.",
    unless=_named_otherwise,
)
def plausible(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Sizes of rows and columns, of norms, and their spread, against the same layer and the layers around.

    Nothing is judged where the weights look untrained. Faults that are the same in all layers may not show.
    """
    from verify.evidence.plausible.balance import unbalanced
    from verify.evidence.plausible.layers import profiled_layers
    from verify.evidence.plausible.siblings import UNTRAINED, fresh, odd_norms, odd_rotary

    values = subject.once(read_values)
    counted(tally, values.stats, UNREAD)
    if (config := usable_config(subject)) is None:
        raise Skip("there is no usable config.json (CK101)")
    if not values.profiles:
        raise Inapplicable("no layer has weights of 16 or 32 bits")
    release = family_of(config).release
    experts = release.experts if release else GATE_UP_DOWN
    layers = profiled_layers(values.profiles, dims_of(config), experts, routers(config))
    suspicions, median = fresh(layers)
    if median < UNTRAINED:
        raise Inapplicable("the weights look untrained: rows and columns differ in size no more than random numbers do")
    exchanged, lines = unbalanced(layers)
    tally.facts["mistakes inside a layer, judged by sizes alone"] = lines
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one in (*suspicions, *exchanged, *odd_norms(layers), *odd_rotary(layers)):
        names[one.expected, one.actual].extend(one.names)
    same = values.compared.keys() - values.differences.keys()
    for (expected, actual), found in names.items():
        held = "the source holds the same: compare that with the release"
        hint = held if same.issuperset(found) else "compare these tensors with the release (--source)"
        yield Issue(expected, actual, hint, names=found, together=True, file=subject.path, severity="warning")
