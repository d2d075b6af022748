"""CK716: compares the tokenizer of engine and trainer with the one next to the trainer's weights."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.core.check import CheckResult, check
from ckptkit.verify.core.issue import Issue, warning_if
from ckptkit.verify.core.skip import NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.side.compare import text_differences
from ckptkit.verify.evidence.side_files import SideFiles
from ckptkit.verify.launch.checks.engine import engine_directory, job_of
from ckptkit.verify.launch.options.argv import last, options_of
from ckptkit.verify.launch.sides import ENGINE

# Options of slime and miles, and SGLang's own, with which SGLang accepts and returns token ids.
_SKIPPED = ("--sglang-skip-tokenizer-init", "--skip-tokenizer-init")
_FURTHER = "use both of one release, unless the weights were trained further with these settings"
_HINT = "pass the HF directory from which the trainer's weights were converted as {}"


def _engine(subject: Subject) -> SideFiles:
    """The files of --hf-checkpoint. Raises NotApplicable if it is not an HF directory."""
    root = engine_directory(subject)
    if not (root / "config.json").exists():
        raise NotApplicable(f"{job_of(subject).hf_option} is not an HF directory (CK714)")
    return SideFiles(root)


@check("CK716", applies_to=_engine)
def one_tokenizer(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Compares the HF directory with `hf/` next to the Megatron weights, as CK708. Other templates are a warning."""
    engine, option = _engine(subject), job_of(subject).hf_option
    result.compared()
    if not engine.has_tokenizer:
        yield _missing(subject, engine)
        return
    sides = [side for side in job_of(subject).sides if side.kind == "megatron" and side.path]
    for root in dict.fromkeys(side.path.parent / "hf" for side in sides if side.path):
        trainer = SideFiles(root)
        if not trainer.has_tokenizer or engine.root.resolve() == root.resolve():
            continue
        try:
            result.compared()
            for one in text_differences(trainer, engine, f"in {option}"):
                # Differences of presentation are correct if the weights were trained further.
                hint = _FURTHER if one.is_presentation else _HINT.format(option)
                severity = warning_if(one.is_presentation or one.severity == "warning")
                expected = f"{one.what}, as in {option}"
                yield Issue(expected, one.words, hint, file=root / one.file, severity=severity, count=one.count)
        except CkptkitError as error:
            yield Issue("readable files", error.message, error.hint or "copy them from the release", file=root)


def _missing(subject: Subject, engine: SideFiles) -> Issue:
    """An error, or a warning if the engine is started without a tokenizer: then only slime's own rollout loads it.

    Source: slime `rollout/sglang_rollout.py` `GenerateState`. A custom rollout function may need no tokenizer.
    """
    job = job_of(subject)
    readers = "engine and trainer load" if any(side.role == ENGINE for side in job.sides) else "the trainer loads"
    expected = f"tokenizer files, which {readers} from {job.hf_option}"
    hint = "copy the tokenizer files from the release"
    if (given := last(options_of(job.text.words), *_SKIPPED)) is None:
        return Issue(expected, "the directory has no tokenizer file", f"{hint} of the model", file=engine.root)
    actual = f"the directory has no tokenizer file, and {given.name} affects only the engine"
    hint += ", unless the launch has a custom rollout function that accepts and returns token ids"
    return Issue(expected, actual, hint, file=engine.root, severity="warning")
