"""Recorded rollouts of slime or miles, computed again in transformers on a CPU."""
