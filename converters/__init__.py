"""HF <-> Megatron mappings: one declarative file a model family, the ops they compose, and the planner that expands them."""
