"""Samples of two checkpoints that must hold the same weights, read without torch and bounded in bytes.

May import what `verify.evidence` may.
"""
