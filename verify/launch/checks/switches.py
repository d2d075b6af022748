"""CK719: switches of a launch whose default, or value, makes training compute something else than generation."""

from __future__ import annotations

from collections.abc import Iterator

from verify.check import Skip, Tally, check
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.launch.checks.engine import engine_config, job_of, unless_skipped
from verify.launch.options.given import GivenArguments

# Backends of attention that do not share a sequence out over context parallel ranks.
# Source: Transformer Engine's `get_attention_backend`; `local` is Megatron's own, which has no context parallelism.
_WHOLE = ("unfused", "local")


def _given(subject: Subject) -> GivenArguments:
    """The arguments of a launch that says what it trains. Raises Skip for any other."""
    given = job_of(subject).arguments
    if not given.describes_model:
        raise Skip("the launch gives no model arguments")
    return given


@check(
    "CK719",
    "no switch makes training compute another function",
    stage="launch",
    rationale=(
        "Megatron drops 0.1 of hidden states and attention unless it is told not to, and computes in another precision "
        "or order than the engine: log-probabilities of trainer and engine drift apart."
    ),
    fix="Give --attention-dropout 0.0 --hidden-dropout 0.0, and the switches that the finding names.",
    unless=unless_skipped(_given),
)
def switches_alike(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Dropout, fp16, the attention backend under context parallelism, and a router's dtype and order."""
    given = _given(subject)
    yield from (*_dropout(given), *_precision(given, subject), *_attention(given), *_experts(given))
    tally.compared(0, 6)


def _warning(given: GivenArguments, name: str, expected: str, actual: str, hint: str) -> Issue:
    word = given.places.get(name)
    file = word.file if word else None
    return Issue(expected, f"{actual}, {_where(given, name)}", hint, file=file, severity="warning")


def _where(given: GivenArguments, name: str) -> str:
    return f"at {given.places[name].place}" if name in given.places else "by default, as the launch does not give it"


def _dropout(given: GivenArguments) -> Iterator[Issue]:
    for name in ("attention_dropout", "hidden_dropout"):
        value = given.get(name, None if given.anything else 0.1)
        if value:
            option = f"--{name.replace('_', '-')} 0.0"
            hint = f"give {option}, unless the training is meant to drop"
            yield _warning(given, name, f"{name} = 0.0, as generation has none", f"{name} = {value}", hint)


def _precision(given: GivenArguments, subject: Subject) -> Iterator[Issue]:
    root = job_of(subject).hf
    config = engine_config(root) if root else {}
    text = config.get("text_config")
    stated = config.get("dtype") or config.get("torch_dtype")
    stated = stated or (text.get("dtype") or text.get("torch_dtype") if isinstance(text, dict) else None)
    if given.get("fp16", False) and stated == "bfloat16":
        hint = "leave --fp16 out: values beyond 65504 become infinite"
        yield _warning(given, "fp16", "bfloat16, as config.json says", "float16", hint)


def _attention(given: GivenArguments) -> Iterator[Issue]:
    backend, ranks = given.get("attention_backend", "auto"), given.get("context_parallel_size", 1) or 1
    if backend in _WHOLE and ranks > 1:
        message = f"attention_backend = {backend} with context_parallel_size = {ranks}"
        hint = "take flash or fused, or --context-parallel-size 1"
        yield _warning(
            given, "attention_backend", "a backend that shares a sequence out: flash, fused or auto", message, hint
        )


def _experts(given: GivenArguments) -> Iterator[Issue]:
    if not given.get("num_experts", 0) or given.anything:
        return
    if given.get("moe_router_dtype", "nothing") not in (None, "fp32", "fp64"):
        actual = f"moe_router_dtype = {given.get('moe_router_dtype', 'nothing')}"
        hint = "give --moe-router-dtype fp32: near ties in bfloat16 choose other experts than the engine does"
        yield _warning(given, "moe_router_dtype", "moe_router_dtype = fp32", actual, hint)
    if not given.get("moe_permute_fusion", False) and "moe_permute_fusion" not in given.unknown:
        # Source: megatron-core `moe_utils.unpermute`, which calls scatter_add_, and torch's list of what is not
        # deterministic on CUDA. How much it comes to was not measured.
        hint = "give it: without it Megatron adds a token's experts up in an order that changes from run to run"
        yield _warning(given, "moe_permute_fusion", "--moe-permute-fusion", "moe_permute_fusion = False", hint)
