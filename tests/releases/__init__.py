"""Releases as they are published: what their config.json and their headers say, and nothing of their weights."""
