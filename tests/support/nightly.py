"""Which cases of a long test run in every `make test`; the others run in `make test-nightly`."""

import pytest


def daily(cases, chosen):
    """The cases as parameters, those that are not chosen marked as nightly. Every chosen one must be a case."""
    cases = list(cases)
    assert all(case in cases for case in chosen), [case for case in chosen if case not in cases]
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.nightly) for case in cases]


def collected(request, name):
    """The values of this parameter in the tests of the module that run, so that a fixture makes no more than these."""
    calls = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    return {call.params[name] for call in calls if call is not None and name in call.params}
