"""Rules that families share: attention, latent attention, experts, multi-token prediction."""
