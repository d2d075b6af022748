"""Every known way in which a checkpoint can be silently wrong, as mutations of clean ones that `verify` has to find.

mutations.yaml is the list. `damage` there is the name of a function of this package, with its arguments; `!do` is a
function itself, or what a function makes of values. `at` has labels of `starts` and the place for each.
"""

from pathlib import Path

import yaml

from mutations import hf_files, hf_tensors, int4, ranks, torch_dist
from mutations.mutation import Mutation

_FUNCTIONS = {
    name: one
    for module in (hf_files, hf_tensors, int4, torch_dist, ranks)
    for name, one in vars(module).items()
    if getattr(one, "__module__", "") == module.__name__
}
for _module in (hf_files, hf_tensors, torch_dist, ranks):
    _FUNCTIONS |= _module.CHANGES


class _Loader(yaml.SafeLoader):
    """YAML with `!do`."""


def _do(loader, node):
    if isinstance(node, yaml.SequenceNode):
        name, *values = loader.construct_sequence(node, deep=True)
        return _FUNCTIONS[name](*values)
    return _FUNCTIONS[node.value]


_Loader.add_constructor("!do", _do)


def _mutation(name, damage, at, **fields):
    function, *values = damage if isinstance(damage, list) else [damage]
    function = _FUNCTIONS[function] if isinstance(function, str) else function
    return Mutation(
        name,
        damage=lambda path, place: function(path, place, *values),
        on={label: place for labels, place in at.items() for label in labels.split()},
        **fields,
    )


_TEXT = Path(__file__).with_name("mutations.yaml").read_text()
MUTATIONS = tuple(_mutation(name, **entry) for name, entry in yaml.load(_TEXT, _Loader).items())  # noqa: S506
