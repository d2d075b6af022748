"""What an engine's own loader made of a checkpoint: every write traced, placed, and compared bit for bit.

Knows no engine: each is an adapter behind the protocol in `engine.py`.
"""
