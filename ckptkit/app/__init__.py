"""The command line, the Python API, jobs and the demo.

May import everything; only `ckptkit/__init__` imports it.
"""
