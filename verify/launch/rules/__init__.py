"""What the trainers' own checks of their arguments refuse, as rules: tables, and functions of what a launch says.

May import the words, options and settings of a launch; the stacks import it.
"""
