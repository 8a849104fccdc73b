"""Real Hugging Face models give the gradients of plain autograd to the bit, and train only what is trainable."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from integration_tests.cases.engines import (
    assert_plain_gradients,
    assert_same_bits,
    cast,
    gradients,
    masters,
    plain_gradients,
    train,
)
from integration_tests.cases.models import VOCABULARY, causal_loss, gpt2, llama, token_batches
from megatrain_ds.tests.releases import PACKED_EXPERTS

EAGER = {"attn_implementation": "eager"}
BOTH = pytest.mark.parametrize("activations", ["recompute", "keep"])


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=3,
        num_decoder_layers=3,
        num_heads=4,
        dropout_rate=0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertForMaskedLM

    sizes = {"embedding_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = AlbertConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=6,
        num_hidden_groups=2,
        inner_group_num=2,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        classifier_dropout_prob=0,
        **sizes,
        **EAGER,
    )
    return AlbertForMaskedLM(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 4}
    dropouts = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes, **dropouts, **EAGER))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 4}
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=5, **sizes, **EAGER))


def mixtral(**changes: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        **EAGER,
        **changes,
    }
    return MixtralForCausalLM(MixtralConfig(**settings))


def own_views(model: nn.Module) -> None:
    """Give every T5 block views of its inputs, so that the gradients of one block's uses are added first.

    The engine's blocks see their inputs through one node each as well. Without it autograd adds the uses of the encoder
    states one by one, over all blocks: the same sum in another order.
    """

    def through_views(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        def view(value: Any) -> Any:
            return value.view_as(value) if isinstance(value, torch.Tensor) and value.requires_grad else value

        return tuple(view(value) for value in args), {key: view(value) for key, value in kwargs.items()}

    for module in model.modules():
        if type(module).__name__ == "T5Block":
            module.register_forward_pre_hook(through_views, with_kwargs=True)


def labelled(ids: torch.Tensor) -> Any:
    return lambda model: model(input_ids=ids, labels=ids).loss


@BOTH
@pytest.mark.parametrize("make", [llama, gpt2, t5, albert, bert, mixtral], ids=lambda make: make.__name__)
def test_language_models(start, device, make, activations) -> None:
    """Decoder, encoder, encoder-decoder with a shared position bias, shared layers, experts; tied heads among them."""
    ids = token_batches(device, 1)[0]
    block = {"activations": activations}
    engine = assert_plain_gradients(start, make(), labelled(ids), device=device, prepare=own_views, block=block)
    assert sum(not unit.is_root for unit in engine.runtime.units) >= 2


@BOTH
def test_vision_tower(start, device, activations) -> None:
    pixels = torch.randn(2, 3, 16, 16).to(device)
    labels = torch.tensor([1, 3]).to(device)
    assert_plain_gradients(
        start,
        vit(),
        lambda model: model(pixel_values=pixels, labels=labels).loss,
        device=device,
        block={"activations": activations},
    )


@pytest.mark.parametrize("make", [t5, gpt2, bert], ids=lambda make: make.__name__)
def test_ties_stay_tied(start, device, make) -> None:
    ids = token_batches(device, 1)[0]
    model = make()
    tied = [
        {name for name, other in model.named_parameters(remove_duplicate=False) if other is param}
        for param in model.parameters()
    ]
    engine = start(model)
    train(engine, [ids] * 3, lambda engine, batch: labelled(batch)(engine))
    named = dict(engine.module.named_parameters(remove_duplicate=False))
    shared = [names for names in tied if len(names) > 1]
    assert shared
    for names in shared:
        assert len({named[name].data_ptr() for name in names}) == 1
    embeddings = engine.module.get_input_embeddings(), engine.module.get_output_embeddings()
    assert torch.equal(embeddings[0].weight, embeddings[1].weight)


@PACKED_EXPERTS
@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_starved_experts(start, device, activations, dtype) -> None:
    """An expert without tokens contributes exactly nothing, also when another micro-batch feeds it."""
    model = mixtral()
    for layer in model.model.layers:
        # Nobody routes to expert 3 of rows whose first feature is positive, nor to 5 of the others.
        layer.mlp.gate.weight.data[3, 0], layer.mlp.gate.weight.data[5, 0] = -50.0, 50.0
    twin = cast(copy.deepcopy(model).to(device), dtype)
    engine = start(model, dtype=dtype, gradient_accumulation_steps=2, block={"activations": activations})
    sums: dict[str, torch.Tensor] = {}
    for ids in token_batches(device, 2, rows=1, length=4):
        twin.zero_grad()
        causal_loss(twin, ids).backward()
        for name, grad in plain_gradients(twin).items():
            sums[name] = sums[name] + grad.float() if name in sums else grad.float()
        engine.backward(causal_loss(engine, ids), scale_wrt_gas=False)
        if engine.micro_steps == 0:
            starved = gradients(engine)
            assert_same_bits(starved, plain_gradients(twin))
            packed = starved["model.layers.0.mlp.experts.gate_up_proj"]
            assert packed.ndim == 3
            unused = [expert for expert in range(8) if not packed[expert].any()]
            assert unused
        engine.step() if engine.micro_steps == 0 else None
    assert_same_bits(gradients(engine), sums)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(rows).relu())


class Experts(nn.Module):
    """Unpacked experts with a list of modules, as before transformers 5; each runs only on its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert() for _ in range(8)])

    def forward(self, hidden: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(hidden[rows]))
        return hidden + out


@BOTH
@pytest.mark.parametrize("accumulation", [1, 2])
def test_starved_unpacked_experts(start, device, activations, accumulation) -> None:
    """grad None of an expert shifts no neighbour's gradient, and an expert idle for a whole step is left alone."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Experts() for _ in range(3)])

        def forward(self, hidden: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                hidden = layer(hidden, choice)
            return hidden.pow(2).mean()

    model = Model()
    twin = copy.deepcopy(model).to(device)
    engine = start(model, gradient_accumulation_steps=accumulation, block={"activations": activations})
    generator = torch.Generator().manual_seed(2)
    before = masters(engine)
    for step in range(2):
        twin.zero_grad()
        for micro in range(accumulation):
            hidden = torch.randn(12, 16, generator=generator).to(device)
            choice = torch.randint(0, 8, (12,), generator=generator).to(device)
            choice[choice == 3] = 4
            choice[choice == (5 if micro == 0 else 6)] = 0
            twin(hidden, choice).backward()
            engine.backward(engine(hidden, choice), scale_wrt_gas=False)
            if micro < accumulation - 1:
                engine.step()
        assert_same_bits(gradients(engine), plain_gradients(twin))
        if step == 0:
            engine.step()
            after = masters(engine)
            idle = [name for name, param in twin.named_parameters() if param.grad is None]
            assert any(".experts.3." in name for name in idle)
            assert_same_bits({name: after[name] for name in idle}, {name: before[name] for name in idle})
            twin.load_state_dict(after)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("make", [llama, gpt2, t5], ids=lambda make: make.__name__)
def test_hugging_face_gradient_checkpointing(start, device, make, use_reentrant) -> None:
    ids = token_batches(device, 1)[0]
    model = make()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()

    def run(twin: Any) -> torch.Tensor:
        out = twin(input_ids=ids, labels=ids)
        # What the switch does besides, for the copy and for the engine: blocks fill no cache.
        assert out.past_key_values is None or out.past_key_values.get_seq_length() == 0
        return out.loss

    def plain(twin: nn.Module) -> None:
        twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        own_views(twin)

    engine = assert_plain_gradients(start, model, run, device=device, prepare=plain)
    assert engine.module.is_gradient_checkpointing
    engine.destroy()
    functions = {getattr(m, "_gradient_checkpointing_func", None) for m in model.modules()} - {None}
    assert not any(function.__module__.startswith("megatrain_ds") for function in functions if callable(function))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_enabled_between_steps(start, device, use_reentrant) -> None:
    ids = token_batches(device, 1)[0]
    model = llama()
    twin = copy.deepcopy(model).to(device)
    engine = start(model)
    train(engine, [ids], causal_loss)
    twin.load_state_dict(engine.module.state_dict())
    engine.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    causal_loss(twin, ids).backward()
    engine.backward(causal_loss(engine, ids))
    assert_same_bits(gradients(engine), plain_gradients(twin))


def test_a_checkpointed_block_runs_twice_a_step(start, device) -> None:
    """Once in forward and once recomputed: the model's own reentrant checkpointing adds no third run."""
    ids = token_batches(device, 1)[0]
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    block = model.model.layers[1]
    own, runs = block.forward, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs.append(0)
        return own(*args, **kwargs)

    block.forward = counted
    engine = start(model)
    for _ in range(2):
        engine.backward(causal_loss(engine, ids))
        engine.step()
    assert len(runs) == 4


@BOTH
@pytest.mark.parametrize("make", [llama, gpt2, t5], ids=lambda make: make.__name__)
def test_key_value_cache_in_training(start, device, make, activations) -> None:
    """use_cache=True fills a dynamic cache in a forward that needs gradients: once, and with the right gradients."""
    ids = token_batches(device, 1)[0]

    def run(model: Any) -> torch.Tensor:
        out = model(input_ids=ids, labels=ids, use_cache=True)
        length = out.past_key_values.get_seq_length()
        assert length == ids.shape[1]
        return out.loss

    block = {"activations": activations}
    assert_plain_gradients(start, make(), run, device=device, prepare=own_views, block=block)


@BOTH
def test_gradient_through_a_cache(start, device, activations) -> None:
    """A prefix is run with gradients, its cache is continued: both forwards get their part."""
    ids = token_batches(device, 1)[0]

    def run(model: Any) -> torch.Tensor:
        prefix = model(input_ids=ids[:, :6], use_cache=True)
        rest = model(input_ids=ids[:, 6:], past_key_values=prefix.past_key_values, labels=ids[:, 6:], use_cache=True)
        return rest.loss + prefix.logits.pow(2).mean()

    block = {"activations": activations}
    assert_plain_gradients(start, llama(), run, device=device, gradient_accumulation_steps=2, block=block)
