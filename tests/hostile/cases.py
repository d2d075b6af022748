"""All hostile inputs."""

from __future__ import annotations

from hostile import json_cases, kinds, links, texts, weights

ALL = [
    *kinds.cases(kinds.FILES),
    *json_cases.cases(),
    *weights.cases(),
    *texts.cases(),
    *links.cases(),
    *kinds.cases(kinds.CARRIED),
]
