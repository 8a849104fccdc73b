"""The forward of a unit: the user's own, on streamed weights, with the user's own graph.

[Note: The graph is the user's]
A unit's forward runs with grad enabled on fresh leaf tensors over the slot's views, as a non-reentrant checkpoint:
saved-tensor hooks keep nothing of the slot, and whatever escapes the unit (outputs, hooks' captures, attributes,
entries of a dict) still carries gradient. The first unpack in backward recomputes the forward on freshly fetched
weights, bound until the unit's last backward node, and gradients arrive at the leaves of the first run.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from megatrain_ds.errors import MegaTrainWarning, StateError, add_note, explain
from megatrain_ds.model.template import Template
from megatrain_ds.runtime.executor import UnitCall
from megatrain_ds.runtime.inputs import (
    Arguments,
    UnchangedInputs,
    WrittenInputs,
    refuse_double_backward,
    renewed,
    through_boundary,
)
from megatrain_ds.runtime.replay import Before, Replay, holds_cache, snapshot
from megatrain_ds.runtime.saved_weights import SavedWeights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatrain_ds.model.compiled import UnitCompiler
    from megatrain_ds.model.units import Unit
    from megatrain_ds.runtime.executor import Executor


Compute = Callable[..., Any]
_HINDRANCES = {
    "cache": (
        "has no effect on a block that fills a key-value cache",
        "Train with use_cache=False (or model.config.use_cache = False)",
    ),
    "hooks": (
        "has no effect on a block with forward hooks on modules inside it",
        "Put the hooks on the block itself, or leave compile out",
    ),
}


class UnitForward:
    """Replaces the forward of a unit's module.

    Args:
        unit: the unit.
        trainable: per parameter, whether gradients are wanted.
        executor: serves weights and takes gradients.
        keep_activations: keep what autograd saves, weights aside, instead of recomputing it.
    """

    def __init__(self, unit: Unit, trainable: Sequence[bool], executor: Executor, *, keep_activations: bool) -> None:
        assert unit.module is not None
        self._unit = unit
        self._module = unit.module
        self._trainable = list(trainable)
        self._executor = executor
        self._template = Template(unit)
        self._replay = Replay(unit.module, unit.name)
        self._inputs = WrittenInputs(unit.name)
        self._keep = keep_activations
        self._forward = unit.module.forward
        self._compiled: Compute | None = None
        self._told = False
        # A positional tensor on the device: it is what makes checkpoint save and restore that device's random state.
        self._anchor = torch.empty(0, device=executor.device)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def install(self) -> None:
        """Redirect the module's forward, and take the gradients of weights used outside it."""
        self._module.forward = self  # type: ignore[method-assign]
        for index, (_, param) in enumerate(self._unit.parameters):
            if self._trainable[index]:
                hook = functools.partial(self._take_outside_gradient, index)
                self._hooks.append(param.register_post_accumulate_grad_hook(hook))

    def compile(self, compiler: UnitCompiler) -> None:
        """Compute with a compiled forward from the next call on; not between a forward and its backward."""
        self._compiled = compiler.compile(self._forward)

    def remove(self) -> None:
        """Give the module its own forward back; idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._module.__dict__.get("forward") is self:
            del self._module.forward
            if self._module.forward != self._forward:
                self._module.forward = self._forward  # type: ignore[method-assign]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module computes on its own weights: it gets its class's forward."""
        module = memo[id(self._module)]
        return types.MethodType(type(self._module).forward, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's forward on streamed weights."""
        try:
            if torch.is_grad_enabled() and (any(self._trainable) or _any_requires_grad((args, kwargs))):
                return self._run_with_graph(args, kwargs)
            compute = self._choose(args, kwargs)
            with self._executor.forward_weights(self._unit.index, None) as views, self._template.bound(views):
                return self._owned(compute(*args, **kwargs), views)
        except Exception as error:
            add_note(error, f"megatrain: raised in unit {self._unit.name} ({type(self._module).__name__})")
            raise

    def _choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compute:
        # Once per call: its recompute must take the same. A graph is specialised for what a cache holds and for the
        # hooks inside the block, which differ from call to call and between forward and recompute.
        if self._compiled is None:
            return self._forward
        hindrance = "hooks" if self._replay.has_inner_hooks() else "cache" if holds_cache(args, kwargs) else None
        if hindrance is None:
            return self._compiled
        if torch.is_grad_enabled() and not self._told:
            self._told = True
            warnings.warn(
                explain("compile", True, *_HINDRANCES[hindrance]) + f" (Unit {self._unit.name}.)",
                MegaTrainWarning,
                stacklevel=2,
            )
        return self._forward

    def _run_with_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = UnitCall(self._unit.index)
        compute = self._choose(args, kwargs)
        args, kwargs = through_boundary(functools.partial(self._executor.finish, call), (args, kwargs))
        if self._keep:
            return self._run_and_keep(call, compute, args, kwargs)
        again: Arguments = snapshot(args, self._unit.name), snapshot(kwargs, self._unit.name)
        versions = self._weight_versions()
        unchanged: UnchangedInputs
        before: Before | None = None
        written: dict[int, torch.Tensor] = {}

        def run(_anchor: torch.Tensor) -> Any:
            nonlocal before, written, unchanged
            if before is not None:
                unchanged.check()
                self._check_weights(versions)
                return self._recompute(call, compute, before, *renewed(again, written))
            self._inputs.before((args, kwargs))
            with self._replay.first_run() as before:
                outputs = self._first_run(call, compute, args, kwargs)
            written = self._inputs.after()
            unchanged = UnchangedInputs(again, written, self._unit.name)
            return outputs

        return checkpoint(run, self._anchor, use_reentrant=False)

    def _first_run(self, call: UnitCall, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._executor.forward_weights(self._unit.index, call) as views:
            leaves = self._leaves(call, views)
            with self._template.bound(leaves):
                return self._owned(compute(*args, **kwargs), views)

    def _recompute(
        self, call: UnitCall, compute: Compute, before: Before, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        views = self._executor.backward_weights(call)
        leaves = [
            view.detach().requires_grad_(trainable) for view, trainable in zip(views, self._trainable, strict=True)
        ]
        with (
            torch.profiler.record_function(f"megatrain::recompute ({self._unit.name})"),
            self._replay.second_run(before),
            self._template.bound(leaves),
        ):
            return compute(*args, **kwargs)

    def _weight_versions(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [param._version for _, param in self._unit.parameters]

    def _check_weights(self, versions: list[int]) -> None:
        for (name, _), old, new in zip(self._unit.parameters, versions, self._weight_versions(), strict=True):
            if old != new:
                raise StateError(
                    f"backward through {name}",
                    ("weights as they were in forward",),
                    "written in place since",
                    "Write weights before forward or after backward",
                )

    def _run_and_keep(self, call: UnitCall, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._executor.forward_weights(self._unit.index, call) as views:
            leaves = self._leaves(call, views)
            with SavedWeights(call, views, self._executor), self._template.bound(leaves):
                return self._owned(compute(*args, **kwargs), views)

    def _leaves(self, call: UnitCall, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves = []
        for index, (view, trainable) in enumerate(zip(views, self._trainable, strict=True)):
            leaf = view.detach()
            if trainable:
                leaf.requires_grad_()
                leaf.register_post_accumulate_grad_hook(functools.partial(self._take_gradient, call, index))
            leaves.append(leaf)
        return leaves

    def _take_gradient(self, call: UnitCall, index: int, leaf: torch.Tensor) -> None:
        refuse_double_backward()
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        # Hooks that the user put on the parameter see the gradient of the leaf that stands for it.
        for hook in list((self._unit.parameters[index][1]._backward_hooks or {}).values()):
            changed = hook(grad)
            grad = grad if changed is None else changed
        self._executor.gradient(call, index, grad)

    def _take_outside_gradient(self, index: int, param: torch.Tensor) -> None:
        # The parameter itself was used: a weight read by a loss, a part of the block called by itself, or a reentrant
        # checkpoint inside the block, whose backward runs when no weights are bound.
        grad, param.grad = param.grad, None
        assert grad is not None
        self._executor.parameter_gradient(self._unit.index, index, grad)

    @staticmethod
    def _owned(outputs: Any, views: Sequence[torch.Tensor]) -> Any:
        # An output that is a view of the slot would change when the slot is filled again.
        slot = views[0].untyped_storage().data_ptr() if views else 0

        def in_slot(value: Any) -> bool:
            return (
                isinstance(value, torch.Tensor)
                and value.layout == torch.strided
                and value.untyped_storage().data_ptr() == slot
            )

        if not any(in_slot(leaf) for leaf in tree_leaves(outputs)):
            return outputs
        return tree_map_only(torch.Tensor, lambda leaf: leaf.clone() if in_slot(leaf) else leaf, outputs)


def _any_requires_grad(tree: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(tree))
