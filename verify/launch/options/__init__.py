"""Options of a trainer: which there are, how argparse reads each, and what a misspelled one was meant to be.

May import the words of a launch, and what asks the settings of a job for a value.
"""
