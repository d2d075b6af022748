"""CK716: the tokenizer that a launch gives to engine and trainer, against the one beside the trainer's weights."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.core.check import Tally, check
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.report import Severity
from ckptkit.verify.core.skip import NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.side.compare import text_differences
from ckptkit.verify.evidence.side_files import SideFiles
from ckptkit.verify.launch.checks.engine import engine_directory, job_of
from ckptkit.verify.launch.options.argv import last, options_of
from ckptkit.verify.launch.sides import ENGINE

# With these SGLang takes and gives token ids; options of slime and miles, and SGLang's own.
_SKIPPED = ("--sglang-skip-tokenizer-init", "--skip-tokenizer-init")
_WARNING: Severity = "warning"
_FURTHER = "right where the weights were trained further; else take both from one release"
_HINT = "give the HF directory of the model that the trainer's weights were converted from as {}"


def _engine(subject: Subject) -> SideFiles:
    """The files of --hf-checkpoint. Raises NotApplicable where it is not an HF directory."""
    root = engine_directory(subject)
    if not (root / "config.json").exists():
        raise NotApplicable(f"{job_of(subject).hf_option} is not an HF directory (CK714)")
    return SideFiles(root)


@check("CK716", applies_to=_engine)
def one_tokenizer(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The tokenizer of the HF directory against the one in `hf/` next to the Megatron weights, as CK708 compares them.

    Other chat templates and special tokens are a warning.
    """
    engine, option = _engine(subject), job_of(subject).hf_option
    tally.compared()
    if not engine.has_tokenizer:
        yield _none(subject, engine)
        return
    for root in dict.fromkeys(
        side.path.parent / "hf" for side in job_of(subject).sides if side.is_megatron and side.path
    ):
        trainer = SideFiles(root)
        if not trainer.has_tokenizer or engine.root.resolve() == root.resolve():
            continue
        try:
            tally.compared()
            for one in text_differences(trainer, engine, f"in {option}"):
                # Differences of presentation are right where the weights were trained further.
                hint, severity = (_FURTHER, _WARNING) if one.is_presentation else (_HINT.format(option), one.severity)
                expected = f"the {one.what} of {option}"
                yield Issue(expected, one.words, hint, file=root / one.file, severity=severity, count=one.count)
        except CkptkitError as error:
            hint = error.hint or "copy them from the release"
            yield Issue("files that can be read", error.message, hint, file=root)


def _none(subject: Subject, engine: SideFiles) -> Issue:
    """An error, or a warning where the engine is started without one: only slime's own rollout loads it then.

    Source: slime `rollout/sglang_rollout.py` `GenerateState`; a rollout function of the user may do without.
    """
    job = job_of(subject)
    words, has_engine = job.text.words, any(side.role == ENGINE for side in job.sides)
    readers = "engine and trainer load" if has_engine else "the trainer loads"
    expected = f"files of a tokenizer, which {readers} from {job.hf_option}"
    hint = "copy the tokenizer files from the release"
    if (given := last(options_of(words), *_SKIPPED)) is None:
        return Issue(expected, "no tokenizer file", f"{hint} of the model", file=engine.root)
    actual = f"no tokenizer file, and {given.name} spares the engine alone"
    hint += ", unless the launch has a rollout function of its own that takes and gives token ids"
    return Issue(expected, actual, hint, file=engine.root, severity="warning")
