"""Reads settings as verl, NeMo-RL and ROLL write them: YAML files that build on others, Hydra overrides, interpolation.

Nothing is run, no stack is imported, and what cannot be resolved stays unresolved.
"""
