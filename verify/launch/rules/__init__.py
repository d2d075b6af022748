"""What trainers' own checks of their arguments refuse, and engines of a draft model: as tables and functions."""
