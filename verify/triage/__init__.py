"""Reads logs of trainers and engines, and names the known symptoms in them with the command that proves each.

Needs `ckptkit.core` alone. `symptoms.toml` is the table of symptoms; `scan` goes through the lines.
"""
