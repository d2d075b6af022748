"""Models that no released Megatron has loaded: their HF side is whole, and Megatron's names are for those who ask.

Each says in `ModelFamily.unwitnessed` what megatron-core lacks.
"""
