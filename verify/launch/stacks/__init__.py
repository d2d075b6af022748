"""What jobs of verl, NeMo-RL and ROLL load, by their settings: one file a stack, from settings to sides and sizes."""
