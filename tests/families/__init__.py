"""Test models of every family that converts, by name. test_families.py runs all its tests on each."""

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
