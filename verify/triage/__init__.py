"""Finds known symptoms in logs of trainers and engines. Needs only `ckptkit.core`. The table is `symptoms.toml`."""
