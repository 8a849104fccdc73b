"""Parameters that look like plain ones while their values stream.

Outside a unit's own compute a parameter is a full-shape tensor of the current value. `StreamedParameter` keeps that
true: an operation that needs the values first waits until they are current, and writes by user code are noticed. It
knows nothing of slots or optimizers; whoever owns the parameter answers through `ParameterOwner`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from megatrain_ds.model.placement import bare_alias, on_compute_device

if TYPE_CHECKING:
    from collections.abc import Iterable

_T = torch.Tensor


def _getter(name: str) -> Any:
    return getattr(_T, name).__get__


# What reads or writes no element of the tensor, and so waits for nothing.
_METADATA = {
    *(
        _getter(name)
        for name in [
            "shape",
            "dtype",
            "device",
            "layout",
            "requires_grad",
            "is_leaf",
            "grad",
            "grad_fn",
            "ndim",
            "_version",
            "output_nr",
            "is_cuda",
            "is_cpu",
            "is_sparse",
            "is_quantized",
            "is_meta",
            "itemsize",
            "nbytes",
            "name",
            "names",
            "_backward_hooks",
            "_post_accumulate_grad_hooks",
        ]
        if hasattr(_T, name)
    ),
    *(getattr(_T, name).__set__ for name in ("requires_grad", "grad", "_backward_hooks") if hasattr(_T, name)),
    *(
        getattr(_T, name)
        for name in [
            "size",
            "numel",
            "nelement",
            "dim",
            "stride",
            "element_size",
            "is_floating_point",
            "is_complex",
            "is_contiguous",
            "storage_offset",
            "requires_grad_",
            "register_hook",
            "register_post_accumulate_grad_hook",
            "retain_grad",
            "get_device",
            "__hash__",
            "__len__",
            "is_shared",
            "is_pinned",
            "__repr__",
            "__format__",
        ]
        if hasattr(_T, name)
    ),
    torch.numel,
    torch.is_floating_point,
    torch.is_complex,
}
_METADATA -= {_T.__repr__, _T.__format__}
_SET_DATA = _T.data.__set__  # type: ignore[attr-defined]


class ParameterOwner(Protocol):
    """Whoever holds the values of a parameter."""

    def before_access(self, param: StreamedParameter) -> None:
        """Make `param.data` current; called before any operation that touches elements."""

    def touched(self, param: StreamedParameter) -> None:
        """User code wrote the values, or holds an alias it may write through."""

    def compute_device(self) -> torch.device | None:
        """Where the forward or backward under way computes; None where none is."""

    def lent(self, param: StreamedParameter, copied: torch.Tensor) -> None:
        """User code holds an alias of a device copy of `param`; what it writes there reaches nobody."""


class StreamedParameter(nn.Parameter):
    """A parameter whose values its owner brings up to date before they are read.

    Made in place from an existing parameter by `adopt`, so that every reference to it (module, optimizer group, user
    variable) stays valid. Results of operations are plain tensors.
    """

    megatrain_owner: ParameterOwner
    megatrain_key: tuple[int, int]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is a plain parameter with memory of its own."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: int) -> Any:
        """Pickled as a plain parameter."""
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(  # noqa: D105
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            # A wait that the compiler traced through would not happen again.
            torch._dynamo.graph_break()
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        streamed = list(_streamed((args, kwargs)))
        for param in streamed:
            param.megatrain_owner.before_access(param)
        with torch._C.DisableTorchFunctionSubclass():
            # A descriptor makes a new setter at every look-up: equal, never the same.
            if func == _SET_DATA:
                return _assign_data(*args)
            versions = [param._version for param in streamed]
            device = streamed[0].megatrain_owner.compute_device() if streamed else None
            args, kwargs, copies = on_compute_device(func, args, kwargs, streamed, device)
            result = func(*args, **kwargs)
            for param, version in zip(streamed, versions, strict=True):
                if param._version != version or bare_alias(result, param):
                    param.megatrain_owner.touched(param)
            for param, copied in copies:
                if bare_alias(result, copied):
                    param.megatrain_owner.lent(param, copied)  # type: ignore[attr-defined]
        return result


def adopt(param: nn.Parameter, owner: ParameterOwner, key: tuple[int, int]) -> StreamedParameter:
    """Turn a parameter into a `StreamedParameter` of `owner`, in place.

    Args:
        param: the parameter; its class is changed, its identity is kept.
        owner: answers for its values.
        key: (unit index, parameter index) by which the owner finds it.
    """
    param.__class__ = StreamedParameter
    assert isinstance(param, StreamedParameter)
    param.megatrain_owner = owner
    param.megatrain_key = key
    return param


def release(param: nn.Parameter) -> None:
    """Undo `adopt`: the parameter is a plain one again, with the values it shows now."""
    if type(param) is StreamedParameter:
        del param.megatrain_owner, param.megatrain_key
        param.__class__ = nn.Parameter  # type: ignore[assignment]


def raw_data(param: torch.Tensor) -> torch.Tensor:
    """`param.data` without waiting and without counting as an access."""
    with torch._C.DisableTorchFunctionSubclass():
        return param.data


def set_raw_data(param: torch.Tensor, data: torch.Tensor) -> None:
    """Point `param.data` at other memory without going through the owner."""
    with torch._C.DisableTorchFunctionSubclass():
        param.data = data


def _streamed(tree: Any) -> Iterable[StreamedParameter]:
    if isinstance(tree, StreamedParameter):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _streamed(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _streamed(item)


def _assign_data(param: StreamedParameter, value: torch.Tensor) -> None:
    # The memory belongs to an arena: an assignment writes the values there instead of replacing the memory.
    if value.shape != param.shape:
        raise ValueError(
            f"parameter data of shape {tuple(value.shape)} assigned where {tuple(param.shape)} streams: the shape of a "
            "streamed parameter is fixed once the engine is built; resize the model before deepspeed.initialize."
        )
    param.data.copy_(value)
    param.megatrain_owner.touched(param)
