"""Runs pieces of work as tasks on a Ray cluster.

May import what transfer may.
"""
