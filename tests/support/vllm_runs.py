"""Loads many checkpoints into real vLLM in one process a rank, as `sglang_runs` does into SGLang."""

import re
from functools import cache, partial

from ckptkit.verify.witnesses.loading.job import ONE_RANK
from ckptkit.verify.witnesses.process.interpreter import Interpreter, python_of
from ckptkit.verify.witnesses.vllm.facts import VLLM
from support import sglang_runs, vllm_faults
from support.processes import end_now, run_logged
from support.sglang_runs import ALTER, swapped_experts

# What a mutation leaves out. Layer 5 has experts in every test model with experts.
LOST = {
    name: re.compile(rf".*layers\.5\.{pattern}")
    for name, pattern in {
        "a norm": r"input_layernorm\.weight",
        "q of q, k and v": r"self_attn\.q_(b_)?proj\.weight(_packed|_scale|_scale_inv)?",
        "q, k and v": r"self_attn\.([qkv]_proj|q_b_proj|kv_b_proj)\.weight(_packed|_scale|_scale_inv)?",
        "output of attention": r"self_attn\.o_proj\.weight(_packed)?",
        "up": r"mlp\.(experts\.3\.)?up_proj\.weight(_packed)?",
        "an expert": r"mlp\.experts\.3\..*",
        "all experts": r"mlp\.experts\..*",
        "a router": r"mlp\.gate\.weight",
        "a router's bias": r"mlp\.gate\.e_score_correction_bias",
        "a scale": r"self_attn\.o_proj\.weight_scale(_inv)?",
        "a scale of an expert": r"mlp\.experts\.3\.down_proj\.weight_scale(_inv)?",
        "a layer": r".*",
    }.items()
} | {"embeddings": re.compile(r"model\.embed_tokens\.weight"), "the output layer": re.compile(r"lm_head\.weight")}
HALF = re.compile(r".*layers\.5\.mlp\.experts\.3\.up_proj\.weight(_packed)?")
_KEY_VALUE = re.compile(r"(.*layers\.5\.self_attn\.)([kv])(_proj\..*)")


def without(pattern, weights):
    return ((name, tensor) for name, tensor in weights if not pattern.fullmatch(name))


def half_an_expert(weights):
    return ((name, tensor.chunk(2)[0] if HALF.fullmatch(name) else tensor) for name, tensor in weights)


def swapped_key_and_value(weights):
    """Keys and values of a layer under each other's names."""
    other = {"k": "v", "v": "k"}
    for name, tensor in weights:
        yield _KEY_VALUE.sub(lambda match: f"{match[1]}{other[match[2]]}{match[3]}", name), tensor


MUTATIONS = {name: partial(without, pattern) for name, pattern in LOST.items()} | {
    "half an expert": half_an_expert,
    "two experts exchanged": swapped_experts,
    "k and v exchanged": swapped_key_and_value,
}


@cache
def release():
    """The release of vLLM that tests ask; None where there is none."""
    found = Interpreter(python_of("vllm", {})).release("vllm")
    return tuple(map(int, found.split("+")[0].split(".")[:3])) if found else None


def run_cases(cases, root, sizes=ONE_RANK, *, gpu=False):
    start = partial(run_logged, program=python_of("vllm", {}), gpu=gpu, limit_s=840)
    return sglang_runs.run_cases(cases, root, sizes=sizes, engine=VLLM, start=start)


if __name__ == "__main__":
    alters = {**ALTER, **MUTATIONS, **vllm_faults.ALTER}
    assert len(alters) == len(ALTER) + len(MUTATIONS) + len(vllm_faults.ALTER)
    sglang_runs.main({name: vllm_faults.restored(alter) for name, alter in alters.items()})
    end_now()
