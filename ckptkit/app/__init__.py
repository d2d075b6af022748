"""The command line, the Python API, and hooks of trainers."""
