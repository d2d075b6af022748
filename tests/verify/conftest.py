"""What the tests of verification share."""

import json
from dataclasses import fields

import pytest

from ckptkit.verify.core.check import all_checks
from ckptkit.verify.core.run import run_checks
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions

_OPTIONS = {one.name for one in fields(VerifyOptions)}


@pytest.fixture
def fresh(releases, copy_of):
    return lambda name, **options: copy_of(releases(name, **options))


@pytest.fixture
def fresh_megatron(converted, copy_of):
    return lambda name: copy_of(converted(name))


@pytest.fixture(scope="session")
def codes():
    return lambda report: list(dict.fromkeys(finding.code for finding in report.findings))


@pytest.fixture(scope="session")
def only():
    def one(report):
        assert len(report.findings) == 1, [str(finding) for finding in report.findings]
        return report.findings[0]

    return one


@pytest.fixture(scope="session")
def edit_json():
    """`edit_json(path, key=value)` sets keys of a JSON file; None removes one."""

    def edit(path, **changes):
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return edit


@pytest.fixture(scope="session")
def alone():
    """`alone(code, path, ...)` runs one check, with keywords of Subject and VerifyOptions. None: it does not apply."""

    def run(code, path, **how):
        options = {name: how.pop(name) for name in _OPTIONS & how.keys()}
        subject = Subject(path, **how, options=VerifyOptions(**options))
        outcome = run_checks(subject, [one for one in all_checks() if one.code == code])
        results, findings = outcome.checks, outcome.findings
        return (results[0] if results else None), findings

    return run


@pytest.fixture(scope="session")
def passes(alone):
    """`passes(code, path, tensors, ...)`: one check finds nothing, and compared so many tensors where that is given."""

    def assert_passes(code, path, tensors=None, **how):
        result, found = alone(code, path, **how)
        assert found == []
        assert result is not None
        assert (result.status, result.tensors_compared) == ("passed", tensors or result.tensors_compared)

    return assert_passes
