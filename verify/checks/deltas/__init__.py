"""Checks of published weight updates (deltas), by themselves and replayed onto their base."""
