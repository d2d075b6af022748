"""Finds what is wrong with an `ignore` list, and a list that all readers agree on."""
