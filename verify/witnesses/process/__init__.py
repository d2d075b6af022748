"""Child processes of verification: how they start, what limits them, how they end, and the files they exchange.

Knows neither engines nor checkpoints.
"""
