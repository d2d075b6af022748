"""torch.save files: the zip archive, its pickle, read without running code, and its tensors."""
