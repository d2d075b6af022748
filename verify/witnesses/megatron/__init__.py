"""Real Megatron as a witness: its ranks load a checkpoint, and their slices are compared with the reference."""
