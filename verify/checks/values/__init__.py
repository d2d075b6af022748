"""Checks of what the weights hold.

May import what checks may.
"""
