"""vLLM as a witness: an adapter for loading, and what stands in for a GPU where there is none."""
