"""transformers as the reference for a model's results: log-probabilities, texts, and single layers."""
