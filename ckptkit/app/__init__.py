"""The command line, the Python API, jobs and the demo."""
