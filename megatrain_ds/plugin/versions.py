"""The tested versions of the packages this plugin hooks into, and the warning outside them.

The lower bounds repeat those of pyproject.toml; the upper ones are the newest that the tests ran with, and nothing
stops a newer one from being installed.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from megatrain_ds.errors import MegaTrainWarning

TESTED = {
    "torch": ("2.5", "2.13"),
    "deepspeed": ("0.18.5", "0.19.8"),
    "transformers": ("4.57", "5.17"),
    "accelerate": ("1.3", "1.15"),
}
"""Package -> (oldest supported, newest tested). A bound of two parts admits every patch release of it."""


@dataclass(frozen=True)
class VersionCheck:
    """One package's installed version against its range.

    Attributes:
        package: Name on the package index.
        installed: Installed version, None when the package is missing.
        oldest: Oldest supported version.
        newest: Newest tested version.
        inside: Whether the installed one lies in the range; True for a missing package.
    """

    package: str
    installed: str | None
    oldest: str
    newest: str
    inside: bool

    def describe(self) -> str:
        """Return one line that names both versions."""
        found = self.installed or "not installed"
        return f"{self.package} {found} (supported from {self.oldest}, tested to {self.newest})"


def check_version(package: str, installed: str | None) -> VersionCheck:
    """Compare one version with its range.

    Args:
        package: A key of `TESTED`.
        installed: A version string, local parts like "+cpu" allowed; None when missing.
    """
    oldest, newest = TESTED[package]
    inside = installed is None or (_compare(installed, oldest) >= 0 and _compare(installed, newest) <= 0)
    return VersionCheck(package, installed, oldest, newest, inside)


def check_versions() -> list[VersionCheck]:
    """Check every package of `TESTED` as installed, without importing any."""
    return [check_version(package, _installed(package)) for package in TESTED]


def warn_untested(checks: list[VersionCheck]) -> None:
    """Warn for each package outside its range, naming the installed and the tested versions."""
    for check in checks:
        if not check.inside:
            text = f"{check.describe()}: results are not checked for it. Install a tested version if something breaks."
            warnings.warn(text, MegaTrainWarning, stacklevel=3)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _compare(installed: str, bound: str) -> int:
    """Return -1, 0 or 1; only as many release parts as `bound` has are compared."""
    from packaging.version import Version

    limit = Version(bound).release
    release = (*Version(installed).release, 0, 0)[: len(limit)]
    return (release > limit) - (release < limit)
