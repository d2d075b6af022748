"""Launches of programs that train and are not read: refused by name, with what can be done. As their documents have."""

from pathlib import Path

import pytest
from support.messages import text_with

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.launch.preflight import preflight

LAUNCHES = (Path(__file__).parents[1] / "jobs" / "others.txt").read_text().split("## ")[1:]


def test_launch_of_a_program_that_is_not_read_is_refused_by_name(tmp_path):
    assert len(LAUNCHES) > 8
    for launch in LAUNCHES:
        heading, _, text = launch.partition("\n")
        name, suffix = heading.split()
        file = tmp_path / f"run{suffix}"
        file.write_text(text)
        with pytest.raises(CkptkitError) as refused:
            preflight(script=file)
        assert refused.value.message == text_with(f"{file} {name};")
        assert "`ckptkit verify DIR`" in str(refused.value.hint)


def test_words_of_a_command_are_told_apart_by_its_program_alone(tmp_path):
    with pytest.raises(CkptkitError, match="OpenRLHF"):
        preflight(arguments=["python3", "-m", "openrlhf.cli.train_ppo_ray", "--pretrain", "x"])
    words = ["python3", "train.py", "--hf-checkpoint", str(tmp_path), "--prompt-data", "/data/trl/scripts/x"]
    assert [one.code for one in preflight(arguments=words).findings] == ["CK714"]


@pytest.mark.parametrize("text", ["# trl sft would do too\necho", "cat trl.txt", "python3 nothing.py"])
def test_what_only_mentions_such_a_program_is_no_launch_of_it(text, tmp_path):
    (tmp_path / "run.sh").write_text(f"{text}\n")
    with pytest.raises(CkptkitError, match="trainer"):
        preflight(script=tmp_path / "run.sh")
