"""Runs pieces of work as tasks on a Ray cluster."""
