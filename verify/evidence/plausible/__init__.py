"""Compares weights with their siblings in the same checkpoint.

May import what evidence may.
"""
