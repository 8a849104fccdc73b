"""Starts engines in this process and compares them with plain PyTorch: gradients, masters, moments, bits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from torch import nn

Tensors = dict[str, torch.Tensor]
LR = 1e-2


def ds_config(
    *, flag: bool = True, dtype: torch.dtype = torch.float32, block: Mapping | None = None, **keys: Any
) -> dict:
    """Stock ZeRO-3 with both offloads, and the flag's line; `keys` override the rest."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": 0.0,
        "steps_per_print": 1000000,
    }
    if dtype is torch.bfloat16:
        config["bf16"] = {"enabled": True}
    if dtype is torch.float16:
        config["fp16"] = {"enabled": True}
    if flag:
        config["offload_engine"] = "megatrain"
        # One thread: models are tiny, and the machine may be shared.
        config["megatrain"] = {"update_threads": 1, **(block or {})}
    config.update(keys)
    return {key: value for key, value in config.items() if value is not None}


def initialize(
    model: nn.Module,
    *,
    optimizer: Any = None,
    model_parameters: Any = None,
    lr_scheduler: Any = None,
    **config: Any,
) -> Any:
    """`deepspeed.initialize` with `ds_config(**config)`; returns the engine."""
    if optimizer is not None:
        config.setdefault("optimizer_block", None)
    keys = {("optimizer" if key == "optimizer_block" else key): value for key, value in config.items()}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        lr_scheduler=lr_scheduler,
        config=ds_config(**keys),
    )
    expected = "MegaTrainEngine" if config.get("flag", True) else "DeepSpeedEngine"
    assert type(engine).__name__ == expected
    return engine


def gradients(engine: Any) -> Tensors:
    """Every trainable parameter's gradient of this step, by DeepSpeed's public function; zeros where there is none."""
    return {name: safe_get_full_grad(p).clone() for name, p in engine.module.named_parameters() if p.requires_grad}


def masters(engine: Any) -> Tensors:
    """fp32 master per trainable parameter."""
    return {n: safe_get_full_fp32_param(p).clone() for n, p in engine.module.named_parameters() if p.requires_grad}


def state(engine: Any) -> Tensors:
    """Masters, both moments, and the weights that the module shows, each to the bit."""
    found = {f"{name}:master": value for name, value in masters(engine).items()}
    for name, param in engine.module.named_parameters():
        found[f"{name}:shown"] = param.detach().clone()
        if param.requires_grad:
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name}:{key}"] = safe_get_full_optimizer_state(param, key).clone()
    return found


def plain_gradients(model: nn.Module) -> Tensors:
    """What autograd left in a plain model, zeros where `grad` is None."""
    return {
        name: torch.zeros_like(param) if param.grad is None else param.grad.clone()
        for name, param in model.named_parameters()
        if param.requires_grad
    }


def differing(actual: Tensors, expected: Tensors) -> dict[str, float]:
    """Largest absolute difference of every entry whose bits differ; all must be of equal shape."""
    assert actual.keys() == expected.keys()
    found = {}
    for name, value in actual.items():
        other = expected[name].to(value.device)
        assert value.shape == other.shape, name
        if not torch.equal(value.float(), other.float()):
            found[name] = (value.double() - other.double()).abs().max().item()
    return found


def assert_same_bits(actual: Tensors, expected: Tensors) -> None:
    """Every tensor is equal to the bit."""
    assert differing(actual, expected) == {}


def largest(differences: Mapping[str, float]) -> float:
    """The largest of the differences; infinite if one is not a number."""
    values = [math.inf if math.isnan(value) else value for value in differences.values()]
    return max(values, default=0.0)


def assert_within(actual: Tensors, expected: Tensors, floor: Iterable[Tensors]) -> None:
    """`actual` differs from `expected` by at most twice what the equivalent runs in `floor` do."""
    allowed = 2 * max(largest(differing(draw, expected)) for draw in floor)
    found = differing(actual, expected)
    assert largest(found) <= allowed, f"difference {largest(found):.3g}, floor allows {allowed:.3g}: {found}"


def assert_plain_gradients(
    start: Callable[..., Any],
    model: nn.Module,
    run: Callable[[Any], torch.Tensor],
    *,
    device: torch.device,
    rounds: int = 2,
    prepare: Callable[[nn.Module], None] = lambda twin: None,
    **config: Any,
) -> Any:
    """The engine's gradients of `run(model)` equal plain autograd's to the bit, twice in a row.

    Args:
        start: the fixture.
        model: moved to the engine after a copy was taken.
        run: takes the model or the engine and returns the loss; it may not keep state outside the model.
        device: where the plain copy runs.
        rounds: forwards and backwards; from the second on the recorded order and mutable buffers are known.
        prepare: called with the plain copy.
        config: for `start`.

    Returns:
        The engine.
    """
    twin = copy.deepcopy(model).to(device)
    prepare(twin)
    engine = start(model, **config)
    for round_ in range(rounds):
        torch.manual_seed(round_)
        expected_loss = run(twin)
        expected_loss.backward()
        torch.manual_seed(round_)
        loss = run(engine)
        assert torch.equal(loss.detach(), expected_loss.detach())
        engine.backward(loss, scale_wrt_gas=False)
        assert_same_bits(gradients(engine), plain_gradients(twin))
        twin.zero_grad()
        engine.reset_iteration()
    return engine


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast parameters as DeepSpeed does: buffers keep fp32."""
    buffers = {id(owner): dict(owner._buffers) for owner in model.modules()}
    model.to(dtype)
    for owner in model.modules():
        owner._buffers.update(buffers[id(owner)])
    return model


class Reference:
    """Plain PyTorch with fp32 masters outside the model, as ZeRO-3 trains: cast, step the masters, cast back.

    Args:
        model: its parameters are cast to `dtype`.
        dtype: compute dtype.
        clip: global gradient norm, 0 for none.
        make: builds the optimizer from the masters, given as parameters in the model's order.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype = torch.float32,
        clip: float = 0.0,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    ) -> None:
        self.model = cast(model, dtype)
        self.clip = clip
        self.pairs = [(p, nn.Parameter(p.detach().float().clone())) for p in self.model.parameters() if p.requires_grad]
        build = make or (lambda parameters: torch.optim.AdamW(parameters, lr=LR, weight_decay=0.01))
        self.optimizer = build([master for _, master in self.pairs])
        self._sums: list[torch.Tensor | None] = [None] * len(self.pairs)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward and add the gradients in fp32."""
        loss.backward()
        for position, (param, _) in enumerate(self.pairs):
            if param.grad is not None:
                grad = param.grad.float()
                held = self._sums[position]
                self._sums[position] = grad.clone() if held is None else held + grad
                param.grad = None

    def step(self) -> float:
        """Clip as ZeRO-3 does, step the masters, and cast back; returns the norm before clipping."""
        norm = sum(float(s.double().pow(2).sum()) for s in self._sums if s is not None) ** 0.5
        factor = 1.0 / max((norm + 1e-6) / self.clip, 1.0) if self.clip else 1.0
        for (_, master), total in zip(self.pairs, self._sums, strict=True):
            master.grad = None if total is None else total * factor
        self.optimizer.step()
        self._sums = [None] * len(self.pairs)
        with torch.no_grad():
            for param, master in self.pairs:
                param.copy_(master)
        return norm

    def masters(self) -> Tensors:
        """fp32 master per trainable parameter, by name."""
        names = [name for name, param in self.model.named_parameters() if param.requires_grad]
        return {name: master.detach().clone() for name, (_, master) in zip(names, self.pairs, strict=True)}


def train(engine: Any, batches: Sequence[Any], loss_of: Callable[[Any, Any], torch.Tensor]) -> None:
    """One backward and one `step()` per batch."""
    for batch in batches:
        engine.backward(loss_of(engine, batch))
        engine.step()
