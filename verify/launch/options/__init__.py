"""Options of a trainer: which there are, how argparse reads each, and what a misspelled one was meant to be."""
