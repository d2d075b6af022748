"""Loading of a checkpoint by an engine's own loader: every write is traced, placed, and compared bit for bit."""
