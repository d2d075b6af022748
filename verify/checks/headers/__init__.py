"""Checks of headers, names and JSON files: no weight is read."""
