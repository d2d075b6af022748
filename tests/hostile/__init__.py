"""Inputs that are made to harm whoever reads them, by name, and the verbs that each is given to.

`bases` makes the sound inputs, the modules of cases break copies of them, `server` runs a verb on one and watches it.
"""
