"""Real Megatron and real SGLang in processes of their own: how they are asked, and how they end."""
