"""Tables of docs/families.md and docs/architecture.md: `make families` writes them, tests compare them."""

import ast
import inspect
import json
import sys
from itertools import pairwise
from pathlib import Path

from support import sglang_cpu_families, vllm_cpu_families

from ckptkit.converters.family import ModelFamily, Release
from ckptkit.converters.megatron.hybrid_model import gpt_only
from ckptkit.converters.planner import dims_of
from ckptkit.converters.registry import FAMILIES
from families import HF_CASES

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "families.md"
NEW_FAMILY = DOCUMENT.with_name("architecture.md")
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
HEAD = (
    "`model_type`",
    "family file",
    "test models",
    "logits compared with",
    "first MTP layer with",
    "dialects",
    "carried along",
)


def config_of(case, **changes):
    """What stands in config.json of a test model, with changes of its language model; `...` leaves a key out."""
    config = dict(case.edit(json.loads(case.config().to_json_string(use_diff=False))))
    text = config.get("text_config", config)
    text = {key: value for key, value in (text | changes).items() if value is not ...}
    return config | {"text_config": text} if "text_config" in config else text


def rows():
    """One row a `model_type` of the registry, in the order of the columns."""
    by_type = {}
    for name, case in HF_CASES.items():
        by_type.setdefault(config_of(case)["model_type"], {})[name] = case
    for model_type, family in sorted(FAMILIES.items()):
        cases = by_type[model_type]
        witnesses = dict.fromkeys(case.witness for case in cases.values())
        mtp = any(dims_of(config_of(case)).mtp_layers for case in cases.values())
        sizes = [dims_of(config_of(case)) for case in cases.values()]
        hybrid, alone = any(not list(gpt_only(one)) for one in sizes), any(one.pattern for one in sizes)
        module = family.read_dims.__module__
        file = module.removeprefix("ckptkit.").replace(".", "/")
        dialects = ", ".join([*([] if alone else ["mcore"]), *family.dialects, *(["hybrid"] if hybrid else [])])
        if family.unwitnessed is not None:
            witnesses = {f"nothing of Megatron: {family.unwitnessed.reason}": None, **dict.fromkeys(engines(cases))}
            names = family.unwitnessed.names
            dialects = f"`--unwitnessed`: {names}'s names" if names else "none: no names are settled"
        yield (
            f"`{model_type}`",
            f"[{Path(sys.modules[module].__file__ or '').name}](../{file}.py)",
            ", ".join(cases),
            "; ".join(witnesses),
            "; ".join(dict.fromkeys(case.mtp_witness for case in cases.values() if case.mtp)) if mtp else "",
            dialects,
            ", ".join(
                [f"`{prefix}*`" for prefix in family.passthrough] + [f"`*{end}`" for end in family.passthrough_suffixes]
            ),
        )


def engines(cases):
    """The engines whose own forward pass, on the CPU, was compared, with what, and for which of these test models."""
    for engine, computed in {"vLLM": vllm_cpu_families.COMPUTED, "SGLang": sglang_cpu_families.COMPUTED}.items():
        by_witness = {}
        for name in cases:
            if name in computed:
                by_witness.setdefault(cases[name].witness, []).append(name)
        for witness, names in by_witness.items():
            yield f"{engine} with {witness}" + (f" ({', '.join(names)})" if len(names) < len(cases) else "")
    for name in cases:
        if name in vllm_cpu_families.WITHOUT:
            yield f"vLLM with transformers, without {vllm_cpu_families.WITHOUT[name][0]}"


def in_markdown(head, lines):
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ("---",) * len(head), *lines])


def table():
    return in_markdown(HEAD, rows())


def fields_table():
    """The fields of `ModelFamily` and of its `Release`, by the docstrings that follow them in the source."""
    found = []
    for where, kind in (("", ModelFamily), ("release.", Release)):
        body = ast.parse(inspect.getsource(kind)).body[0].body
        for one, after in pairwise(body):
            if isinstance(one, ast.AnnAssign):
                assert isinstance(after, ast.Expr), f"{kind.__name__}.{one.target.id}: explain the field below it"
                found.append((f"`{where}{one.target.id}`", " ".join(ast.literal_eval(after.value).split())))
    return in_markdown(("field", "for"), found)


def write(document, content):
    """Puts a table between the marks in a document."""
    before, _, rest = document.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    document.write_text(f"{before}{BEGIN}\n{content}\n{END}{after}")


def main():
    write(DOCUMENT, table())
    write(NEW_FAMILY, fields_table())


if __name__ == "__main__":
    main()
