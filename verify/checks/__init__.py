"""One function a check, by subject.

May import evidence, witnesses and launch.
"""
