"""Nothing but CkptkitError leaves a parser, whatever the file is: each is given the hostile files of all the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import tracked
from ckptkit.formats.hf.reader import read_json, shard_names
from ckptkit.formats.hf.shard import read_shard
from ckptkit.formats.torch_dist.foreign_names import refuse_foreign_names
from ckptkit.formats.torch_dist.reader import read_metadata
from ckptkit.formats.torch_save.blob import Blob
from ckptkit.formats.torch_save.saved_file import SavedFile
from ckptkit.transfer.manifest import read_manifest
from hostile.json_cases import TEXTS
from hostile.texts import LOGS, YAML
from hostile.weights import PICKLES, RAW, ZIPS, _zip
from verify.launch.settings.config import read_yaml
from verify.triage.triage import triage
from verify.witnesses.rollouts.recorded import read_recording

# Each parser, and the name of the file that it is given.
PARSERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "read_json": ("config.json", read_json),
    "shard_names": ("model.safetensors.index.json", lambda file: shard_names(file.parent)),
    "read_shard": ("model.safetensors", read_shard),
    "read_metadata": (".metadata", lambda file: read_metadata(file.parent)),
    "refuse_foreign_names": (".metadata", lambda file: refuse_foreign_names(file.parent)),
    "Blob": ("common.pt", lambda file: Blob(file, 0, file.stat().st_size).object()),
    "SavedFile": ("model_optim_rng.pt", lambda file: SavedFile(file).content),
    "read_recording": ("rollout.pt", read_recording),
    "read_manifest": ("ckptkit.json", read_manifest),
    "tracked": ("latest_checkpointed_iteration.txt", lambda file: tracked(file.parent)),
    "read_yaml": ("job.yaml", read_yaml),
    "triage": ("log.txt", lambda file: triage([str(file)])),
}
_SMALL = 20_000  # bytes: larger ones are for the verbs
CONTENTS = [
    content
    for table in (TEXTS, RAW, PICKLES, ZIPS, YAML, LOGS, {name: _zip(one) for name, one in PICKLES.items()})
    for content in table.values()
    if len(content) < _SMALL
]


@pytest.mark.parametrize("name", PARSERS)
def test_nothing_but_ckptkit_errors_leaves_a_parser(name: str, tmp_path: Path) -> None:
    file, parse = PARSERS[name]
    refused = 0
    for content in CONTENTS:
        (tmp_path / file).write_bytes(content)
        try:
            parse(tmp_path / file)
        except CkptkitError:
            refused += 1
    assert len(CONTENTS) > 100
    assert refused
