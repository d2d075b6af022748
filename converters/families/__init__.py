"""One file a model family: which `model_type`s, how its config is read, and its rules, composed of shared blocks."""
