"""Reads logs of trainers and engines, and names the known symptoms in them with the command that proves each.

core` alone. Each table of symptoms is a file; `scan` goes through the lines.
"""
