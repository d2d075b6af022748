"""Readers of launches, one file per training stack: they return the sides and sizes of a job."""
