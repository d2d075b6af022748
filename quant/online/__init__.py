"""Quantizes the weights of a trainer while it streams them to SGLang.

May import the rest of quant.
"""
