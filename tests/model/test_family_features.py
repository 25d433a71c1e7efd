"""Each family with each feature, on a small random model: the table of families in `.docs/pages/models.md`
lists these. They run with `--soak`. CI has the tests of each feature, in other files, for some families.
"""

import feature_cases
import pytest

import xinfer_jax as xj
from xinfer_jax.plugins import names

pytestmark = pytest.mark.oldest

PAIRS = [(feature, family) for feature in feature_cases.CHECKS for family in feature_cases.FAMILIES]


def test_every_family_has_a_case():
    assert sorted(feature_cases.FAMILIES) == sorted(names("family"))


@pytest.mark.soak
@pytest.mark.parametrize(("feature", "family"), PAIRS)
def test_a_family_has_the_feature(feature, family, tmp_path):
    check = feature_cases.CHECKS[feature]
    if feature_cases.is_supported(feature, family):
        check(family, tmp_path)
    else:
        with pytest.raises(xj.InputError):
            check(family, tmp_path)
