"""The command line, the Python API, jobs and the demo.

May import everything; only the modules beside this folder (`ckptkit/__init__`, `hooks`, `hooks_verl`) import it.
"""
