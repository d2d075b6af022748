"""Facts about inference engines, one file an engine: a row for each model with special behaviour in its class."""
