"""Lines of logs in the form in which the programs print them, for each symptom of `triage`, and logs of sound runs.

Source: the messages of Megatron-LM `training/checkpointing.py` and `core/dist_checkpointing`, slime and miles
`backends/megatron_utils`, SGLang 0.5.16, vLLM, torch, transformers 4 and 5, Ray, NCCL. Paths, names and numbers are
ours.
"""

from __future__ import annotations

from pathlib import Path

_LOGS = Path(__file__).parents[1] / "verify/triage/logs"

# By the key of the symptom; the last line is the one that shows it.
SNIPPETS = {
    key: lines.rstrip("\n")
    for key, _, lines in (part.partition("\n") for part in (_LOGS / "symptoms.txt").read_text().split("## ")[1:])
}
CLEAN = {path.stem.removeprefix("sound-"): path.read_text() for path in sorted(_LOGS.glob("sound-*.txt"))}
