"""Files that torch.save wrote: the zip archive, its pickle read without running anything, and its tensors."""
