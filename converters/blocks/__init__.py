"""Rules that families share: attention, latent attention, experts, multi-token prediction.

May import ops and config.
"""
