"""A live SGLang engine on GPUs as a witness: what it answers, and what it holds after weight updates.

May import evidence and `verify.witnesses.sglang`.
"""
