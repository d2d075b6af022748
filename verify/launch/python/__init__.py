"""Reads model arguments and launchers in Python files of miles, by constants and simple conditions. Runs nothing."""
