"""Real Megatron as a witness: the job, the ranks that load it, and what each parameter should hold."""
