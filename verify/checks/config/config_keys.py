"""Finds the key of config.json that a Megatron argument follows from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError

# Keys whose value is an object of settings of the language model.
_NESTED = ("text_config", "rope_parameters", "rope_scaling")
Args = Callable[[Mapping[str, Any]], Mapping[str, Any]]
Path = tuple[str, ...]


def keys_behind(here: Mapping[str, Any], there: Mapping[str, Any], args: Args) -> dict[str, tuple[str, Any, Any]]:
    """The key in `here` behind each argument that differs, the value there and the value here, where a single key is.

    A key counts when the config `here` with one other value has the argument of `there`: the argument itself under a
    key that states it here (the two may spell it differently), or the value that `there` has under the same key. `args`
    gives the arguments of a config.
    """
    mine, its, wanted, found = dict(_leaves(here)), dict(_leaves(there)), args(there), args(here)
    changed = {path: its.get(path) for path in {**mine, **its} if mine.get(path) != its.get(path)}
    exchanged = [(path, value, _args_of(with_value(here, path, value), args)) for path, value in changed.items()]
    behind: dict[str, tuple[str, Any, Any]] = {}
    for name in sorted(wanted.keys() | found.keys()):
        want, have = wanted.get(name), found.get(name)
        if want == have:
            continue
        stated = [
            path
            for path, value in mine.items()
            if type(value) in (int, float) and value == have and type(have) in (int, float)
        ]
        tried = [*((path, want, _args_of(with_value(here, path, want), args)) for path in stated), *exchanged]
        for path, value, outcome in tried:
            if outcome is not None and outcome.get(name) == want:
                behind[name] = ".".join(path), its.get(path, value), mine.get(path)
                break
    return behind


def _leaves(config: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in config.items():
        if key in _NESTED and isinstance(value, Mapping):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def with_value(config: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """The config with another value at `path`; None stands for a key that is not there."""
    key, *rest = path
    inner = config.get(key)
    return {
        **config,
        key: with_value(inner if isinstance(inner, Mapping) else {}, tuple(rest), value) if rest else value,
    }


def _args_of(config: Mapping[str, Any], args: Args) -> Mapping[str, Any] | None:
    """The arguments of a config, None where its values do not go together."""
    try:
        return args(config)
    except (CkptkitError, TypeError, ValueError):
        return None
