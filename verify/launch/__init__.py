"""How a training job finds its weights, read from its launch."""
