"""CK740: reference, critic and teacher of another model than the one that the launch builds."""

import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from support.messages import text_with
from support.models import edit_metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from ckptkit.verify.launch.preflight import preflight

NAME, OTHER = "qwen2-untied", "qwen3-untied"
ROLES = {"critic": "--critic-load", "teacher": "--opd-teacher-load"}


def launch(hf, actor, *words):
    given = ["--hf-checkpoint", str(hf)] if hf else []
    return preflight(arguments=[*given, "--ref-load", str(actor), *words])


def with_arguments(root, **arguments):
    path = root / "release" / "common.pt"
    common = torch.load(path, weights_only=False)
    common["args"] = Namespace(**(vars(common["args"]) | arguments))
    torch.save(common, path)
    return root


def with_value_head(root):
    """A critic as slime saves it: its output layer has one row, whatever the vocabulary."""

    def one_row(metadata):
        head = metadata.state_dict_metadata["output_layer.weight"]
        head.size = torch.Size((1, head.size[1]))
        head.chunks = [ChunkStorageMetadata(torch.Size((0, 0)), head.size)]

    edit_metadata(root / "release", one_row)
    return root


@pytest.mark.parametrize("role", ROLES)
def test_a_role_of_another_model_is_found_and_the_right_one_passes(role, releases, converted, only):
    """slime and miles load both into the model that the launch's arguments build."""
    hf, actor = releases(NAME), converted(NAME)
    finding = only(launch(hf, actor, ROLES[role], str(converted(OTHER))))
    assert (finding.code, finding.severity, finding.file) == ("CK740", "error", str(converted(OTHER) / "release"))
    assert finding.expected == f"the model of {hf}/config.json"
    sound = launch(hf, actor, ROLES[role], str(actor))
    assert (sound.status, sound.findings) == ("passed", [])


def test_a_critic_with_a_value_head_is_sound(releases, converted, copy_of):
    critic = with_value_head(copy_of(converted(NAME)))
    report = launch(releases(NAME), converted(NAME), "--critic-load", str(critic))
    assert (report.status, report.findings) == ("passed", [])
    # Of a teacher the log-probabilities are asked for.
    report = launch(releases(NAME), converted(NAME), "--opd-teacher-load", str(critic))
    assert [(one.code, one.tensor) for one in report.findings] == [("CK740", "output_layer.weight")]


def test_arguments_alone_make_another_model(releases, converted, copy_of, only):
    teacher = with_arguments(copy_of(converted(NAME)), rotary_base=500_000)
    finding = only(launch(releases(NAME), converted(NAME), "--opd-teacher-load", str(teacher)))
    assert (finding.code, finding.tensor) == ("CK740", None)
    assert finding.actual == text_with("rotary_base = 500000 10000")


def test_without_an_engine_the_sides_are_compared_with_each_other(converted, tmp_path, only):
    finding = only(preflight(load=converted(NAME), ref_load=converted(OTHER)))
    assert (finding.code, finding.file) == ("CK740", str(converted(OTHER) / "release"))
    assert finding.expected == text_with(f"{converted(NAME) / 'release'}")
    same = Path(shutil.copytree(converted(NAME), tmp_path / "same"))
    assert preflight(load=converted(NAME), ref_load=same).findings == []


def test_headers_of_a_role_that_cannot_be_read_are_a_finding(releases, converted, copy_of, only):
    teacher = copy_of(converted(NAME))
    (teacher / "release" / ".metadata").write_bytes(b"\x80\x04")
    finding = only(launch(releases(NAME), converted(NAME), "--opd-teacher-load", str(teacher)))
    assert (finding.code, finding.expected) == ("CK740", text_with("headers"))
