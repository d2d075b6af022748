"""What jobs of slime, miles, vime, Relax and Megatron-LM load, by their options, and how their GPUs are shared out."""
