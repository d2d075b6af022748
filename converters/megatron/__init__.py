"""A model in Megatron: arguments, pipelines, tensor-parallel cuts, module names and legacy files."""
