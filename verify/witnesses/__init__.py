"""Real Megatron, engines and transformers in separate processes: their jobs, reports and exits."""
