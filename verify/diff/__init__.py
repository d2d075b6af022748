"""`diff`: what two checkpoints of any formats have in common, tensor by tensor, and how far the rest is apart.

May import `verify.evidence` and everything below it.
"""
