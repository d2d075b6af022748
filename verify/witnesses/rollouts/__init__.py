"""What slime or miles recorded of a rollout, held against what transformers makes of the checkpoint; needs no GPU.

May import evidence, `verify.witnesses.reference` and what starts a witness.
"""
