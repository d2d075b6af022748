"""Reads Python files that are data in the form of code: model arguments and launchers of miles. Nothing is run.

What cannot be worked out from constants, f-strings, defaults and simple conditions is not known.
"""
