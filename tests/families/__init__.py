"""Test models of every family that converts, by name. A new family gets every test of test_families.py by adding its cases here."""

from __future__ import annotations

from families import dsa, glm4_moe, gpt_oss, gqa, hybrid, mla, mtp, qwen, sandwich
from families.case import Case

CASES: dict[str, Case] = {
    **qwen.CASES,
    **glm4_moe.CASES,
    **mtp.CASES,
    **gqa.CASES,
    **mla.CASES,
    **dsa.CASES,
    **sandwich.CASES,
    **gpt_oss.CASES,
    **hybrid.CASES,
}
