"""All hostile inputs."""

from __future__ import annotations

from hostile import json_cases, kinds, links, texts, weights

ALL = [*kinds.cases(), *links.cases(), *json_cases.cases(), *weights.cases(), *texts.cases()]
