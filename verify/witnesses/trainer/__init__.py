"""A trainer's own argument parsing of a launch."""
