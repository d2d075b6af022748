"""HF <-> Megatron mappings: one declarative file a model family, and the planner that expands them."""
