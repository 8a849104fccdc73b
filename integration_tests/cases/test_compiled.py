"""Compiled units: one graph for all units of a class, the gradients of a model whose blocks torch.compile took."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from integration_tests.cases.engines import assert_plain_gradients, assert_same_bits, gradients, masters, train
from integration_tests.cases.models import (
    KEEP_OR_RECOMPUTE,
    Block,
    Stack,
    WithAuxiliary,
    causal_loss,
    gpt2,
    ids_of,
    llama,
    token_batches,
    with_loss,
)
from megatrain_ds.errors import MegaTrainWarning, UnsupportedModelError


class CountingBackend:
    """Compiles with a backend of torch's own and counts the graphs."""

    def __init__(self, name: str) -> None:
        self._compile = torch._dynamo.lookup_backend(name)
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.graphs += 1
        return self._compile(graph, inputs)


@pytest.fixture(autouse=True)
def _forget_graphs() -> None:
    torch._dynamo.reset()


def compile_blocks(model: nn.Module, backend: Any) -> None:
    """What a user does to a plain model: each block's forward compiled."""
    for blocks in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for block in blocks:
            block.forward = functools.partial(torch.compile(type(block).forward, backend=backend), block)


def assert_compiled_gradients(start: Any, model: nn.Module, run: Any, backend: str = "aot_eager", **config: Any) -> Any:
    """As `assert_plain_gradients`, with the blocks of the plain copy compiled and those of the engine."""

    def start_compiled(model: nn.Module, **config: Any) -> Any:
        engine = start(model, **config)
        engine.compile(backend=backend)
        return engine

    prepare = functools.partial(compile_blocks, backend=backend)
    return assert_plain_gradients(start_compiled, model, run, prepare=prepare, **config)


@KEEP_OR_RECOMPUTE
@pytest.mark.parametrize("make", [llama, gpt2], ids=lambda make: make.__name__)
def test_gradients_of_language_models(start, device, make, activations) -> None:
    ids = ids_of(device)
    block = {"activations": activations}
    assert_compiled_gradients(start, make(), lambda model: causal_loss(model, ids), device=device, block=block)


@KEEP_OR_RECOMPUTE
def test_gradients_with_the_native_compiler(start, device, activations) -> None:
    block = {"activations": activations}
    assert_compiled_gradients(start, Stack(), with_loss(device), "inductor", device=device, block=block)


@KEEP_OR_RECOMPUTE
def test_an_auxiliary_loss_left_on_a_block_carries_gradient(start, device, activations) -> None:
    class Model(Stack):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) + sum(block.auxiliary for block in self.blocks)

    model = Model(*[WithAuxiliary() for _ in range(3)])
    assert_compiled_gradients(start, model, with_loss(device), device=device, block={"activations": activations})


@KEEP_OR_RECOMPUTE
def test_a_block_that_reads_another_blocks_weight(start, device, activations) -> None:
    """The weight that is read is a streamed one, whose wait must not end up in a graph."""

    class Borrows(Block):
        lender: Any = None

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) @ self.lender[0].up.weight.T @ self.lender[0].up.weight

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__(*[Borrows() for _ in range(3)])
            for i, block in enumerate(self.blocks):
                block.lender = (self.blocks[(i + 1) % 3],)  # a tuple: not registered as a submodule

    model = Model()
    waits: list[int] = []
    engine = start(model, block={"activations": activations})
    engine.compile(backend="aot_eager")
    wait = engine.runtime.access.before_access
    engine.runtime.access.before_access = lambda param: (waits.append(0), wait(param))[1]
    ids, counts = ids_of(device), []
    for _ in range(4):
        twin = Model().to(device)
        twin.load_state_dict(masters(engine))
        expected = twin(ids)
        expected.backward()
        waits.clear()
        loss = engine(ids)
        engine.backward(loss)
        counts.append(len(waits))
        torch.testing.assert_close(loss.detach(), expected.detach())
        for name, grad in gradients(engine).items():
            torch.testing.assert_close(grad, dict(twin.named_parameters())[name].grad, rtol=1e-4, atol=1e-6)
        engine.step()
    assert counts[-1] == counts[-2] > 0


def test_one_graph_for_all_units_and_all_steps(start, device) -> None:
    backend = CountingBackend("aot_eager")
    engine = start(llama(5))
    engine.compile(backend=backend)
    train(engine, token_batches(device, 4), causal_loss)
    assert backend.graphs == 1
    # A second length makes one graph for any length, an evaluation one without gradients.
    train(engine, token_batches(device, 1, length=9), causal_loss)
    train(engine, token_batches(device, 1, length=15), causal_loss)
    assert backend.graphs == 2
    with torch.no_grad():
        causal_loss(engine, ids_of(device))
    assert backend.graphs == 3
    train(engine, token_batches(device, 2), causal_loss)
    assert backend.graphs == 3


def test_two_lengths_before_one_backward(start, device) -> None:
    """Each recompute takes the graph of its own forward, whichever ran last."""
    model = llama()
    engine = start(model, gradient_accumulation_steps=2)
    engine.compile(backend="aot_eager")
    for length in (12, 15, 9):
        engine.backward(causal_loss(engine, token_batches(device, 1, length=length)[0]))
    engine.reset_iteration()
    first, second = token_batches(device, 1)[0], token_batches(device, 1, length=18)[0]
    loss = causal_loss(engine, first) + causal_loss(engine, second)
    engine.backward(loss)
    assert all(grad.isfinite().all() for grad in gradients(engine).values())


def test_the_setting_trains_as_engine_compile_does(start, device) -> None:
    results = []
    for setting in (True, False):
        torch.manual_seed(0)
        engine = start(Stack(), block={"compile": setting})
        if not setting:
            engine.compile(backend="inductor")
        assert all(forward._compiled is not None for forward in engine.runtime.forwards)
        train(engine, token_batches(device, 2), lambda engine, ids: engine(ids))
        results.append(masters(engine))
    assert_same_bits(*results)


def told_of_compile(run: Any) -> list[str]:
    """What was warned about compile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if w.category is MegaTrainWarning and "compile" in str(w.message)]


def test_a_cache_is_computed_without_the_compiler_and_told_once(start, device) -> None:
    backend = CountingBackend("aot_eager")
    engine = start(llama())
    engine.compile(backend=backend)
    ids = ids_of(device)

    def run() -> None:
        for _ in range(2):
            engine.backward(engine(input_ids=ids, labels=ids, use_cache=True).loss)
            engine.step()

    told = told_of_compile(run)
    assert len(told) == len(engine.runtime.forwards)
    assert "use_cache=False" in told[0]
    assert backend.graphs == 0


def test_hooks_inside_a_block_are_called_once_a_forward(start, device) -> None:
    engine = start(Stack())
    engine.compile(backend="aot_eager")
    seen: list[int] = []
    engine.module.blocks[1].up.register_forward_hook(lambda *_: seen.append(0))
    told = told_of_compile(lambda: train(engine, [ids_of(device)] * 2, lambda engine, ids: engine(ids)))
    assert len(seen) == 2
    assert len(told) == 1
    assert "hooks" in told[0]


@pytest.mark.parametrize(
    "settings", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}], ids=["mode", "options"]
)
def test_cuda_graphs_are_refused(start, settings) -> None:
    engine = start(Stack())
    with pytest.raises(UnsupportedModelError, match="addresses of weights.*max-autotune-no-cudagraphs"):
        engine.compile(backend="inductor", compile_kwargs=settings)


def test_compiled_autograd_is_refused(start) -> None:
    with pytest.raises(UnsupportedModelError, match="engine.compile"):
        start(Stack()).compile(compiled_autograd_enabled=True)


def test_a_model_compiled_elsewhere_is_refused_before_and_after(start, device) -> None:
    model = Stack()
    model.blocks[0].compile(backend="aot_eager")
    with pytest.raises(UnsupportedModelError, match=r'blocks\.0 .*"compile": true'):
        start(model)
    model = Stack()
    engine = start(model)
    model.blocks[1].compile(backend="aot_eager")
    with pytest.raises(UnsupportedModelError, match=r'blocks\.1 .*"compile": true'):
        engine(ids_of(device))
