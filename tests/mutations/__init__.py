"""Every known way in which a checkpoint can be silently wrong, as mutations of clean ones that `verify` has to find."""

from __future__ import annotations

from dataclasses import replace

from mutations import arguments, configuration, hf_files, hf_names, int4, optimizer, ranks, torch_dist, values

_SUBJECTS = (hf_files, hf_names, configuration, torch_dist, arguments, values, optimizer, int4, ranks)
MUTATIONS = tuple(replace(one, name=name) for subject in _SUBJECTS for name, one in subject.MUTATIONS.items())
