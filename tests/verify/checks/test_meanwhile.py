"""What is written beside or into a checkpoint while it is verified: its own files count, a trainer's others do not."""

import inspect
import os
import shutil

import pytest

from ckptkit.core.errors import CkptkitError
from ckptkit.storage.fingerprint import ChangedError
from ckptkit.verify import run
from ckptkit.verify.core.run import run_checks as run_all
from ckptkit.verify.diff.diff import diff
from ckptkit.verify.run import verify


def log(path):
    (path / "train.log").write_text("step 11\n")
    (path / "runs").mkdir(exist_ok=True)
    (path / "runs" / "events.out.tfevents.1").write_bytes(b"\0")
    (path / "trainer_state.json").write_text("{}")


def another_iteration(path):
    """As Megatron saves one beside the release, and says so in the tracker."""
    shutil.copytree(path / "release", path / "iter_0000011")
    (path / "latest_checkpointed_iteration.txt").write_text("11")


def another_checkpoint(path):
    """As transformers' trainer saves one below the model."""
    shutil.copytree(path, path.parent / "checkpoint-11")
    shutil.move(path.parent / "checkpoint-11", path / "checkpoint-11")


def touched(pattern):
    def change(path):
        file = min(path.glob(pattern))
        file.write_bytes(file.read_bytes())
        os.utime(file, ns=(1, 1))

    return change


def one_more_shard(path):
    shutil.copy(min(path.glob("*.safetensors")), path / "model-00099-of-00099.safetensors")


@pytest.fixture
def meanwhile(monkeypatch):
    """`meanwhile(change)`: what happens when all checks have run, and before the files are looked at again."""

    def at_the_end(change):
        def run_checks(*arguments):
            outcome = run_all(*arguments)
            change()
            return outcome

        monkeypatch.setattr(run, "run_checks", run_checks)

    return at_the_end


@pytest.mark.parametrize(
    ("kind", "change", "is_own"),
    [
        ("hf", log, False),
        ("hf", another_checkpoint, False),
        ("megatron", another_iteration, False),
        ("hf", touched("*.safetensors"), True),
        ("hf", touched("tokenizer.model"), True),
        ("hf", lambda path: min(path.glob("*.safetensors")).unlink(), True),
        ("hf", one_more_shard, True),
        ("megatron", touched("release/.metadata"), True),
    ],
)
def test_a_file_of_the_checkpoint_that_changes_ends_the_run_and_no_other(
    kind, change, is_own, fresh, fresh_megatron, meanwhile
):
    path = (fresh if kind == "hf" else fresh_megatron)("qwen2-tied")
    meanwhile(lambda: change(path))
    if is_own:
        with pytest.raises(ChangedError, match="changed"):
            verify(path)
    else:
        report = verify(path)
        assert (report.status, report.findings) == ("passed", [])


def test_a_source_counts_as_the_checkpoint_does(releases, fresh, meanwhile):
    source = fresh("qwen2-tied")
    meanwhile(lambda: log(source))
    assert verify(releases("qwen2-tied"), source=source).status == "passed"
    meanwhile(lambda: touched("*.safetensors")(source))
    with pytest.raises(CkptkitError, match="changed"):
        verify(releases("qwen2-tied"), source=source)


def test_diff_takes_a_log_for_none_of_its_files(releases, fresh, monkeypatch):
    path = fresh("qwen2-tied")
    globals_of_diff = inspect.unwrap(diff).__globals__
    compare = globals_of_diff["compare_checkpoints"]

    def compared(*arguments, **named):
        result = compare(*arguments, **named)
        log(path)
        return result

    monkeypatch.setitem(globals_of_diff, "compare_checkpoints", compared)
    assert not diff(path, releases("qwen2-tied")).differing
