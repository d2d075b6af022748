"""What the trainers' own checks of their arguments refuse, as rules: tables, and functions of what a launch says.

May import the words and options of a launch, and what asks the settings of a job for a value.
"""
