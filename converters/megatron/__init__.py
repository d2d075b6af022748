"""What Megatron makes of a model: its arguments, pipelines, tensor-parallel cuts, module names and legacy files."""
