"""What slime or miles recorded of a rollout, held against what transformers makes of the checkpoint; needs no GPU.

witnesses.reference` and what starts a witness.
"""
