"""Checks of how a training job is launched, which only preflight runs."""
