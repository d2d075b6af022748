"""Real Megatron, engines and transformers in processes of their own: their jobs, reports and exits."""
