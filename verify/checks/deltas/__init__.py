"""Checks of weight updates that were published as deltas, alone and replayed onto their base."""
