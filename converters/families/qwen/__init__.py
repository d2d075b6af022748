"""Qwen 2 to 3.6, dense, mixtures of experts, hybrids, and their vision models."""
