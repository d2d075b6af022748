"""What config.json means, and what is refused by name: the rows of configs.toml, whose head explains them."""

import json
import tomllib
from dataclasses import replace
from functools import cache
from operator import attrgetter
from pathlib import Path

from families import HF_CASES
from families.table import config_of
from releases.record import load
from support.messages import text_with

from ckptkit.converters.megatron.arguments import megatron_args
from ckptkit.converters.planner import dims_of
from ckptkit.core.errors import CkptkitError
from ckptkit.verify.checks.config.arguments import mismatches

TABLES = tomllib.loads(Path(__file__).with_name("configs.toml").read_text())


@cache
def stated(model):
    config = dict(load(model).config) if "/" in model else config_of(HF_CASES[model])
    dims_of(config)
    return config


def value_of(text):
    if text == "...":
        return ...
    if not text.startswith("["):
        return json.loads(text.replace("'", '"'))
    parts = (part.partition("]*") for part in text.split("+"))
    lists = (json.loads((head + "]" * bool(star)).replace("'", '"')) * int(times or 1) for head, star, times in parts)
    return [item for one in lists for item in one]


def values_of(text):
    return {key: value_of(value) for key, _, value in (part.partition("=") for part in text.split())}


def changed(model, changes):
    config = json.loads(json.dumps(stated(model)))
    for key, value in changes.items():
        *path, leaf = key.removeprefix(".").split(".")
        place = config if key.startswith(".") else config.get("text_config", config)
        for part in path:
            place = place[part]
        place[leaf] = value
        if value is ...:
            del place[leaf]
    return config


def rows(table):
    """Model, changes and what comes behind the arrow."""
    for model, lines in TABLES[table].items():
        for line in lines:
            changes, _, expected = line.partition("=> ")
            yield model, values_of(changes), expected


def plain(value):
    return [plain(one) for one in value] if isinstance(value, list | tuple | range) else value


def refusal(config, *, arguments=False):
    """The words of the refusal, or nothing."""
    try:
        dims = dims_of(config)
        if arguments:
            megatron_args(dims)
    except CkptkitError as error:
        return str(error)
    return ""


def test_a_key_with_one_value_in_all_releases_has_no_other():
    for model, keys in TABLES["one_value"].items():
        for key in keys.split():
            words = [refusal(changed(model, {key: value})) for value in (True, False, "other", 97)]
            assert sum(key.split(".")[-1] in one for one in words) >= 3, (model, key)


def test_values_that_readers_cannot_agree_on_are_named():
    for model, changes, words in rows("refused"):
        said = refusal(changed(model, changes))
        shown = [text for key, value in changes.items() for text in (key.split(".")[-1], str(value))]
        assert said == text_with(words) if words else any(one in said for one in shown), (model, changes, said)


def test_rope_scaling_that_megatrons_arguments_cannot_say_is_refused():
    for model, changes, words in rows("without_arguments"):
        assert not refusal(stated(model), arguments=True)
        assert refusal(changed(model, changes), arguments=True) == text_with(words), (model, changes)


def test_changes_that_mean_the_same_model():
    """As the unchanged config, or as other changes. Rope scaling has several spellings; its arguments tell it."""
    for model, changes, others in rows("same"):
        one, other = (dims_of(changed(model, values)) for values in (changes, values_of(others)))
        assert replace(one, rope_scaling={}) == replace(other, rope_scaling={}), (model, changes)
        assert megatron_args(one) == megatron_args(other), (model, changes)


def test_sizes_and_layers_follow_from_the_config():
    for model, changes, expected in rows("dims"):
        dims = dims_of(changed(model, changes))
        for field, value in values_of(expected).items():
            assert plain(attrgetter(field)(dims)) == value, (model, changes, field)


def test_megatrons_arguments_follow_from_the_config():
    for model, changes, expected in rows("args"):
        args = megatron_args(dims_of(changed(model, changes)))
        for name, value in values_of(expected).items():
            assert plain(args.get(name)) == value, (model, changes, name)


def test_arguments_of_another_model_are_named():
    for model, changes, names in rows("other_model"):
        dims = dims_of(stated(model))
        args = {name: value for name, value in (megatron_args(dims) | changes).items() if value is not ...}
        assert [name for name, _, _ in mismatches(dims, args)] == names.split(), (model, changes)
