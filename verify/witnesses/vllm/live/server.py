"""A running `vllm.LLM`, and the requests of the witness. vLLM is imported only inside functions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.verify.witnesses.live.job import EngineJob
from ckptkit.verify.witnesses.live.server import NotTried
from ckptkit.verify.witnesses.reference.job import TOP, Judged
from ckptkit.verify.witnesses.vllm.facts import QUIET

WORKER = "ckptkit.verify.witnesses.vllm.live.worker.LiveWorker"
_SETTINGS = {
    **QUIET,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less; several ranks still have their own workers
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# For the prompts. With a fixed size vLLM measures no memory, so other processes may use the GPU at the same time.
_CACHE_BYTES = 4 << 30


class VllmServer:
    """A `live.server.Server` for vLLM."""

    def __init__(self, job: EngineJob, checkpoint: HfCheckpoint, llm: Any) -> None:
        self._job, self._checkpoint, self._llm = job, checkpoint, llm

    def stop(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def answers(self) -> list[Judged]:
        import vllm

        params = vllm.SamplingParams(
            temperature=0, detokenize=False, max_tokens=1, prompt_logprobs=TOP, ignore_eos=True
        )
        tokens = [{"prompt_token_ids": list(prompt)} for prompt in self._job.prompts]
        answers: Sequence[Any] = self._llm.generate(tokens, params, use_tqdm=False) if tokens else []
        pairs = zip(self._job.prompts, answers, strict=True)
        return [_judged(prompt, answer.prompt_logprobs[1:]) for prompt, answer in pairs]

    def held(self) -> dict[str, tuple[str, int]]:
        ranks = self._llm.collective_rpc("live_held")
        return {
            f"{rank} {name}": (digest, size) for rank, held in enumerate(ranks) for name, (digest, size) in held.items()
        }

    def check(self, action: str) -> Sequence[str]:
        """Returns nothing: the read-back shows all that a checker of vLLM would."""
        return []

    def update_by_tensor(self) -> None:
        self._llm.collective_rpc("live_update", args=(self._job.checkpoint,))

    def update_from_disk(self) -> None:
        self._llm.collective_rpc("reload_weights")

    def release_and_resume(self) -> None:
        """Sleeps at level 2, which drops weights. Raises NotTried on a CPU."""
        from vllm.platforms import current_platform

        if not current_platform.is_sleep_mode_available():
            raise NotTried("not tried, since vLLM sleeps only on a GPU")
        self._llm.sleep(level=2)
        self._llm.wake_up()
        self._llm.collective_rpc("live_poison")

    def snapshot_and_poison(self) -> None:
        self._llm.collective_rpc("live_poison")


def serve(job: EngineJob, checkpoint: HfCheckpoint) -> VllmServer:
    os.environ.update(_SETTINGS)
    import vllm
    from vllm.platforms import current_platform

    cache = {} if current_platform.is_cpu() else {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": _CACHE_BYTES}
    dtype = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "auto")
    llm = vllm.LLM(
        model=job.checkpoint,
        dtype="bfloat16" if dtype == "float32" else "auto",
        tensor_parallel_size=job.sizes.tp,
        pipeline_parallel_size=job.sizes.pp,
        enable_expert_parallel=job.sizes.ep > 1,
        distributed_executor_backend="mp" if job.sizes.ranks > 1 else None,
        worker_extension_cls=WORKER,
        skip_tokenizer_init=True,
        trust_remote_code=False,
        enforce_eager=True,
        enable_prefix_caching=False,  # every prompt is computed anew
        enable_sleep_mode=job.release_resume and bool(current_platform.is_sleep_mode_available()),
        max_model_len=max(map(len, job.prompts), default=0) + 1,
        max_num_seqs=8,
        max_logprobs=TOP,
        disable_log_stats=True,
        limit_mm_per_prompt={"image": 0, "video": 0},
        seed=0,
        **cache,
    )
    return VllmServer(job, checkpoint, llm)


def version() -> str:
    import vllm

    return str(vllm.__version__)


def _judged(prompt: Sequence[int], found: Sequence[Mapping[int, Any]]) -> Judged:
    """At each position vLLM returns the most probable tokens, and the prompt's own if it is not among them."""
    own = [float(place[token].logprob) for token, place in zip(prompt[1:], found, strict=True)]
    best = [sorted(place.items(), key=lambda pair: pair[1].rank)[:TOP] for place in found]
    return Judged(
        own,
        [[int(token) for token, _ in place] for place in best],
        [[float(one.logprob) for _, one in place] for place in best],
    )
