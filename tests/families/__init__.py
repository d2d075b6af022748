"""Test models of every family that converts, by name. A new family gets every test of test_families.py by adding its cases here."""

from __future__ import annotations

from families import glm4_moe, mtp, qwen
from families.case import Case

CASES: dict[str, Case] = {**qwen.CASES, **glm4_moe.CASES, **mtp.CASES}
