"""Tested ranges: what lies inside, and the warning that names both versions."""

from __future__ import annotations

import warnings

import pytest

from megatrain_ds.errors import MegaTrainWarning
from megatrain_ds.plugin.versions import TESTED, check_version, check_versions, warn_untested


@pytest.mark.parametrize(
    ("package", "installed", "inside"),
    [
        ("torch", "2.13.0+cpu", True),
        ("torch", "2.13.4", True),
        ("torch", "2.14.0", False),
        ("torch", "2.4.1", False),
        ("torch", "2.5.0", True),
        ("deepspeed", "0.18.5", True),
        ("deepspeed", "0.18.4", False),
        ("deepspeed", "0.19.8", True),
        ("deepspeed", "0.19.9+abc", False),
        ("transformers", "4.57.0", True),
        ("transformers", "6.0", False),
        ("transformers", None, True),
    ],
)
def test_the_range_is_compared_by_release_parts(package, installed, inside):
    assert check_version(package, installed).inside is inside


def test_a_version_outside_warns_with_both():
    with pytest.warns(MegaTrainWarning, match=r"deepspeed 0\.20\.0 \(supported from 0\.18\.5, tested to 0\.19\.8\)"):
        warn_untested([check_version("deepspeed", "0.20.0")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_untested([check_version("deepspeed", "0.19.0")])


def test_the_lower_bounds_are_those_of_the_package_metadata():
    from megatrain_ds.tests.conftest import ROOT

    text = (ROOT / "pyproject.toml").read_text()
    for package, (oldest, _) in TESTED.items():
        assert f'"{package}>={oldest}"' in text
    assert {check.package for check in check_versions()} == set(TESTED)
