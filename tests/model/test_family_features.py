"""Each family with each feature, on a small random model: the table of families in `.docs/pages/models.md`
lists these. `--soak` has all families; other files test the features themselves.
"""

import feature_cases
import pytest
from quick import full_except

import xinfer_jax as xj
from xinfer_jax.plugins import names

pytestmark = pytest.mark.oldest

PAIRS = [(feature, family) for feature in feature_cases.CHECKS for family in feature_cases.FAMILIES]
IN_FULL = ("qwen3_moe",)  # other families have tests of their own in the full set


def test_every_family_has_a_case():
    assert sorted(feature_cases.FAMILIES) == sorted(names("family"))


@pytest.mark.parametrize(
    ("feature", "family"), full_except((), PAIRS, soak=[pair for pair in PAIRS if pair[1] not in IN_FULL])
)
def test_a_family_has_the_feature(feature, family, tmp_path):
    check = feature_cases.CHECKS[feature]
    if feature_cases.is_supported(feature, family):
        check(family, tmp_path)
    else:
        with pytest.raises(xj.InputError):
            check(family, tmp_path)
