"""Facts about inference engines, one file an engine: a row for each model whose class is not a plain one."""
