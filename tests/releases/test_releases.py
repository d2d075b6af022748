"""Published releases pass every verb that answers from headers, with no finding but those that lie in the release."""

import pytest
from support.nightly import daily

from releases.record import load, models, one_of_each_type
from releases.verbs import LARGE, check_every_verb

SMALLER = [model for model in models() if model not in LARGE]
# One of each kind, and those with findings: by day a few of them.
DAILY = {*one_of_each_type(SMALLER), *(model for model in SMALLER if load(model).findings)}


@pytest.mark.parametrize("model", daily(models(), sorted(DAILY)[::9]))
def test_release_as_published_has_no_finding(model, tmp_path):
    check_every_verb(model, tmp_path)
