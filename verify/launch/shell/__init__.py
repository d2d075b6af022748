"""Bash, read and never run: enough of the language to tell which words a launch script gives to its trainer."""
