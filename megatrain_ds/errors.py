"""The exceptions and the warning class of the package.

A message names the thing, its value, the rule it broke and the next action. This module imports nothing but the
standard library at load time: `EngineConfigError`, which is also a `DeepSpeedConfigError`, is built when first asked
for, because importing it imports DeepSpeed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_GIB = 1024**3


def explain(name: str, value: object, rule: str, action: str) -> str:
    """Format one message: what it is, its value, the rule, what to do next.

    Args:
        name: The setting, module, tensor or file the message is about.
        value: Its actual value, shown with `repr`.
        rule: What is true of it or demanded of it, without a final stop.
        action: The reader's next action, without a final stop.
    """
    return f"{name} = {value!r}: {rule}. {action}."


def add_note(error: BaseException, note: str) -> None:
    """Say where an error came from without changing what it is; before Python 3.11 errors carry no notes."""
    if hasattr(error, "add_note"):
        getattr(error, "add_note")(note)  # noqa: B009 - absent from Python 3.10's type


class MegaTrainWarning(UserWarning):
    """A setting without effect, a slower fallback, or a version outside the tested range."""


class MegaTrainError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(MegaTrainError, ValueError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another."""


class UnsupportedModelError(MegaTrainError, ValueError):
    """A module's structure cannot be served; the message names the module and the reason."""


class UnsupportedOptimizerError(MegaTrainError, ValueError):
    """The optimizer, or one of its options, has no host update here."""


class UnsupportedVersionError(MegaTrainError, ImportError):
    """An installed package has a signature that the plugin cannot hook; the message shows it."""


class CheckpointError(MegaTrainError, RuntimeError):
    """A checkpoint is missing, incomplete, or does not fit the model or the optimizer."""


class HostMemoryError(MegaTrainError, MemoryError):
    """Host memory does not suffice; raised before anything is allocated.

    Args:
        need_bytes: Bytes the plan needs.
        have_bytes: Bytes that are available, or the configured limit.
        action: What to change, without a final stop.
    """

    def __init__(self, need_bytes: int, have_bytes: int, action: str) -> None:
        """Keep both figures for callers that plan around them."""
        super().__init__(need_bytes, have_bytes, action)
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes
        self.action = action

    def __str__(self) -> str:
        """Say both figures in GiB and in bytes."""
        return (
            f"host memory: need {self.need_bytes / _GIB:.2f} GiB ({self.need_bytes} bytes), "
            f"have {self.have_bytes / _GIB:.2f} GiB ({self.have_bytes} bytes). {self.action}."
        )


class StateError(MegaTrainError, RuntimeError):
    """A transition was asked for from a state that does not allow it.

    Args:
        transition: What was asked for, for example "slot 1: begin_fill".
        allowed: Names of the states that allow it.
        actual: Name of the state it is in.
        action: What to do, without a final stop.
    """

    def __init__(self, transition: str, allowed: tuple[str, ...], actual: str, action: str = "") -> None:
        """Keep the parts, so a handler need not parse the message."""
        super().__init__(transition, allowed, actual, action)
        self.transition = transition
        self.allowed = allowed
        self.actual = actual
        self.action = action

    def __str__(self) -> str:
        """Name the allowed and the actual state."""
        text = f"{self.transition}: allowed from {' or '.join(self.allowed)}, but the state is {self.actual}."
        return f"{text} {self.action}." if self.action else text


if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfigError

    class EngineConfigError(ConfigError, DeepSpeedConfigError):
        """A `ConfigError` that handlers of DeepSpeed's own configuration errors catch as well."""


def _build_engine_config_error() -> type[Exception]:
    from deepspeed.runtime.config import DeepSpeedConfigError

    return type(
        "EngineConfigError",
        (ConfigError, DeepSpeedConfigError),
        {
            "__doc__": "A `ConfigError` that handlers of DeepSpeed's own configuration errors catch as well.",
            "__module__": __name__,
        },
    )


def __getattr__(name: str) -> Any:
    """Build `EngineConfigError` on first use and keep it, so that there is one class and it pickles."""
    if name != "EngineConfigError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, _build_engine_config_error())
