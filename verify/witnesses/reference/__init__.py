"""transformers as the reference for what a model computes: log-probabilities, texts, and single layers."""
