"""vLLM as a witness."""
