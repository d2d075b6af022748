"""What trained weights look like, by comparison within one checkpoint alone.

May import what evidence may.
"""
