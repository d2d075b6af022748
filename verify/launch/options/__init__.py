"""Options of a trainer: their names, how argparse reads them, and corrections for misspelled ones."""
