"""Compares samples of two checkpoints that must hold the same weights, without torch and bounded in bytes.

May import what `verify.evidence` may.
"""
