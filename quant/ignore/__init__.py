"""Which tensors are packed: what the model is made of, and how each reader takes `ignore` and `targets`."""
