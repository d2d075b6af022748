"""Parallel layouts to load test models at, as keywords of Subject."""

from ckptkit.verify.checks.witnesses.megatron import all_layers, all_regions, right_slices, strict_load
from ckptkit.verify.core.check import CheckResult

CHECKS = {"CK401": strict_load, "CK402": right_slices, "CK403": all_layers, "CK404": all_regions}

DENSE = {
    "TP2": {"tp": 2},
    "PP2 uneven": {"pp": 2, "decoder_last_pipeline_num_layers": 3},
    "VPP2": {"pp": 2, "vpp": 2},
    "TP2 PP2": {"tp": 2, "pp": 2},
    "PP2": {"pp": 2},
}
EXPERTS = {"EP2": {"ep": 2}, "TP2 EP2": {"tp": 2, "ep": 2}, **DENSE}


def two_of(number, experts, impossible=()):
    """Two different layouts for the test model of this number; all models together have all of them."""
    names = [name for name in (EXPERTS if experts else DENSE) if name not in impossible]
    first, apart = number % len(names), 1 + number // len(names) % (len(names) - 1)
    return names[first], names[(first + apart) % len(names)]


def judge(subject):
    results = {code: CheckResult("", "") for code in CHECKS}
    return [finding for code, check in CHECKS.items() for finding in check(subject, results[code])], results
