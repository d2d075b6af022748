"""Reads settings of verl, NeMo-RL and ROLL: YAML files with defaults, Hydra overrides, interpolations. Runs nothing."""
