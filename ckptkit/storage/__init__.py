"""Bytes on disks and at URLs: reading, writing, digests and locks."""
