"""A block's inputs: passed through a boundary for backward, and kept for the recompute if the block writes them.

A recompute runs on the inputs of the real forward. A block that writes one in place (`x += residual`, a leading
`ReLU(inplace=True)`) would be recomputed on what it left behind, so such inputs are copied first. Whether a block does
so is learned at its first call, which copies in any case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatrain_ds.errors import UnsupportedModelError, explain

if TYPE_CHECKING:
    from collections.abc import Callable

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Boundary(torch.autograd.Function):
    """Passes a unit's inputs through; its backward is the unit's last."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: D102
        ctx.done = done
        ctx.set_materialize_grads(False)
        # Not a view in autograd's eyes: the block may write it in place, as it may write what the caller gave it.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: D102
        refuse_double_backward()
        ctx.done()
        return (None, *grads)


def refuse_double_backward() -> None:
    """Raise when the backward under way builds a graph of its own: it would save weights that are about to leave.

    Raises:
        UnsupportedModelError: under `create_graph=True`.
    """
    if torch.is_grad_enabled():
        raise UnsupportedModelError(
            explain(
                "create_graph",
                True,
                "a backward through streamed blocks cannot be differentiated again: its weights leave the device",
                "Compute gradient penalties on a model without the flag, or leave create_graph out",
            )
        )


def through_boundary(done: Callable[[], None], arguments: Arguments) -> Arguments:
    """Pass inputs that require grad through a node whose backward calls `done`.

    Only tensors given directly or in tuples: a list or dict keeps its identity, since the block may write to it for
    others to read.

    Args:
        done: called when every gradient of the inputs is known.
        arguments: (args, kwargs) of the block.
    """
    found = [tensor for tensor in direct_tensors(arguments) if tensor.requires_grad]
    if not found:
        return arguments
    passed = _Boundary.apply(done, *found)
    return _replaced(arguments, {id(old): new for old, new in zip(found, passed, strict=True)})  # type: ignore[arg-type]


def direct_tensors(arguments: Arguments) -> list[torch.Tensor]:
    """Tensors given directly or in tuples, in order."""
    args, kwargs = arguments
    return [tensor for value in (*args, *kwargs.values()) for tensor in _tensors(value)]


class WrittenInputs:
    """Learns whether a block writes its inputs in place, and keeps copies of those it writes.

    Args:
        name: the block, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._writes: bool | None = None
        self._seen: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []

    def before(self, arguments: Arguments) -> None:
        """Call before the block runs: notes versions, and copies unless the block is known to write nothing."""
        copies = self._writes is not False
        self._seen = [
            (tensor, tensor._version, tensor.detach().clone().requires_grad_(tensor.requires_grad) if copies else None)
            for tensor in direct_tensors(arguments)
        ]

    def after(self) -> dict[int, torch.Tensor]:
        """Call after the block ran.

        Returns:
            The old values of every input that the block wrote, by the id of that input.

        Raises:
            UnsupportedModelError: a block that wrote nothing before does now, and its inputs were not copied.
        """
        seen, self._seen = self._seen, []
        written = [(tensor, copied) for tensor, version, copied in seen if tensor._version != version]
        if not written:
            self._writes = bool(self._writes)
            return {}
        if any(copied is None for _, copied in written):
            raise UnsupportedModelError(
                explain(
                    self._name,
                    "an input written in place",
                    "the block left its inputs alone in its first call, so they are no longer copied for the recompute",
                    'Write to a clone in the block, or set "activations": "keep" in the megatrain block',
                )
            )
        self._writes = True
        return {id(tensor): copied for tensor, copied in written if copied is not None}


class UnchangedInputs:
    """Makes sure that what a recompute is given is what the real forward was given.

    Args:
        arguments: (args, kwargs) of the recompute, after the real forward.
        old: what `WrittenInputs.after` returned; those inputs are copies of ours.
        name: the block, for messages.
    """

    def __init__(self, arguments: Arguments, old: dict[int, torch.Tensor], name: str) -> None:
        self._versions = [
            (x, x._version) for x in direct_tensors(arguments) if id(x) not in old and not x.is_inference()
        ]
        self._name = name

    def check(self) -> None:
        """Call before the recompute.

        Raises:
            UnsupportedModelError: an input was written after the block ran.
        """
        for tensor, version in self._versions:
            if tensor._version != version:
                raise UnsupportedModelError(
                    explain(
                        f"{self._name}: an input of shape {tuple(tensor.shape)}",
                        "written in place after the block ran",
                        "the block is recomputed from its inputs in backward",
                        'Give each block a tensor of its own, or set "activations": "keep" in the megatrain block',
                    )
                )


def renewed(arguments: Arguments, old: dict[int, torch.Tensor]) -> Arguments:
    """`arguments` with old values in place of written ones; each a copy that the block may write again.

    Args:
        arguments: (args, kwargs) of the recompute.
        old: what `WrittenInputs.after` returned.
    """
    if not old:
        return arguments
    return _replaced(arguments, {key: value.clone() for key, value in old.items()})


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) is tuple:
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _replaced(arguments: Arguments, replacement: dict[int, torch.Tensor]) -> Arguments:
    def replace(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return replacement.get(id(value), value)
        return tuple(replace(item) for item in value) if type(value) is tuple else value

    args, kwargs = arguments
    return tuple(replace(value) for value in args), {key: replace(value) for key, value in kwargs.items()}
