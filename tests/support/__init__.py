"""What tests share: models, checkpoints, servers and programs that they start."""
