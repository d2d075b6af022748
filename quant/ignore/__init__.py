"""Decides which tensors are packed, by the modules of the model and each reader's view of `ignore` and `targets`."""
