"""`zero.Init` for our configuration: full tensors, of the same bits that stock ZeRO-3 loads."""

from __future__ import annotations

import contextlib
import gc
import json
import types
from typing import Generic, TypeVar

import deepspeed
import pytest
import torch
from torch import nn

from megatrain_ds.errors import EngineConfigError, UnsupportedVersionError
from megatrain_ds.plugin import zero_init
from megatrain_ds.tests.programs import read_result, run_program

OURS = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "offload_engine": "megatrain"}
BF16 = {**OURS, "bf16": {"enabled": True}}

DIGEST = """
import hashlib
def digest(model):
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        with deepspeed.zero.GatheredParameters([tensor] if hasattr(tensor, "ds_id") else []):
            data = tensor.data.cpu().contiguous()
            bits = hashlib.sha256(data.reshape(-1).view(torch.uint8).numpy()).hexdigest()
            found[name] = [str(data.dtype), list(data.shape), bits]
    return found
"""

LOAD = """
import json, sys
import torch, deepspeed
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig
folders, flag = json.loads(sys.argv[1]), json.loads(sys.argv[2])
result = {"partitioned": [], "full": [], "weights": {}}
for compute in ("fp32", "bf16", "fp16"):
    for asked in (None, "float32", "bfloat16"):
        block = {} if compute == "fp32" else {compute: {"enabled": True}}
        config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, **block, **flag}
        keep = HfDeepSpeedConfig(config)
        options = {} if asked is None else {"dtype": getattr(torch, asked)}
        model = LlamaForCausalLM.from_pretrained(folders["llama"], **options)
        result["full"].append(all(p.numel() > 0 for p in model.parameters()))
        result["partitioned"].append(any(hasattr(p, "ds_id") for p in model.parameters()))
        result["weights"][f"{compute} {asked}"] = digest(model)
        torch.manual_seed(3)
        result["weights"][f"{compute} {asked} fresh"] = digest(LlamaForCausalLM._from_config(model.config, **options))
        model.resize_token_embeddings(70)
        result["full"].append(model.get_input_embeddings().weight.numel() > 0)
        other = AutoModelForCausalLM.from_pretrained(folders["gpt2"], **options)
        result["weights"][f"{compute} {asked} gpt2"] = digest(other)
print("RESULT " + json.dumps(result))
"""

LOAD_PROGRAM = DIGEST + LOAD


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, str]:
    """A small Llama (rotary buffers) and a small GPT-2 (tied head, masks) with fp32 weights, as safetensors."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    configs = {
        "llama": LlamaConfig(vocab_size=64, **sizes),
        "gpt2": GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32),
    }
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, config in configs.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return {name: str(folder / name) for name in configs}


def run_with(installed, program: str, *arguments: str) -> dict:
    return read_result(run_program(f"import sys; sys.argv = {['program', *arguments]!r}\n{program}", installed))


def load(checkpoints: dict[str, str], installed, flag: dict) -> dict:
    return run_with(installed, LOAD_PROGRAM, json.dumps(checkpoints), json.dumps(flag))


def test_transformers_loads_full_weights_of_the_same_bits(checkpoints, installed):
    ours = load(checkpoints, installed, {"offload_engine": "megatrain"})
    stock = load(checkpoints, installed, {})
    assert not any(ours["partitioned"])
    assert all(ours["full"])
    assert all(stock["partitioned"])
    assert ours["weights"] == stock["weights"]
    rotary = [name for name in ours["weights"]["bf16 None"] if name.endswith("inv_freq")]
    assert [ours["weights"]["bf16 None"][name][0] for name in rotary] == ["torch.bfloat16"] * 2


FACTORIES = """
import json, sys
import torch, deepspeed
from torch import nn
from deepspeed.runtime.zero.partition_parameters import DeepSpeedTensorOverride
flag = json.loads(sys.argv[1])
class Child(nn.Module):
    _keep_in_fp32_modules_strict = ["strict_bias"]
    _keep_in_fp32_modules = ["half_bias"]
    def __init__(self):
        super().__init__()
        for name in ("strict_bias", "half_bias", "other_bias"):
            self.register_buffer(name, torch.full((3,), 1.0009765625))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.child = nn.Linear(3, 2), nn.BatchNorm1d(2), Child()
        self.skipped = nn.utils.skip_init(nn.Linear, 3, 2)
        self.undeclared = nn.Parameter(torch.linspace(0, 1, 7))
        self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
        made = {
            "tensor": torch.tensor([0.1, 0.2]), "counts": torch.tensor([1, 2]), "zeros": torch.zeros(2),
            "ones": torch.ones(2), "arange": torch.arange(0, 1, 0.3), "eye": torch.eye(2), "randn": torch.randn(4),
            "linspace": torch.linspace(0, 1, 5), "asked": torch.ones(2, dtype=torch.float32),
            "legacy": torch.Tensor(2).fill_(0.7), "computed": 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)),
        }
        for name, value in made.items():
            self.register_buffer(name, value, persistent=name != "ones")
result = {}
every = {"default": {}, "none": {"tensor_overrides": []},
         "device": {"tensor_overrides": [DeepSpeedTensorOverride.device]},
         "dtype": {"tensor_overrides": [DeepSpeedTensorOverride.dtype]}}
for compute in ("fp32", "bf16", "fp16"):
    block = {} if compute == "fp32" else {compute: {"enabled": True}}
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, **block, **flag}
    for overrides, options in every.items():
        with deepspeed.zero.Init(config_dict_or_path=config, **options):
            torch.manual_seed(3)
            model = Model()
            with deepspeed.zero.Init(config_dict_or_path=config, **options):
                model.inner = Child()
            model.after = nn.Embedding(3, 2)
        with deepspeed.zero.GatheredParameters(list(model.skipped.parameters()), modifier_rank=0):
            for parameter in model.skipped.parameters():
                nn.init.constant_(parameter, 0.3)
        result[f"{compute} {overrides}"] = digest(model)
    torch.manual_seed(4)
    given = nn.Sequential(nn.Linear(3, 2), Child())
    deepspeed.zero.Init(module=given, config_dict_or_path=config)
    result[f"{compute} given"] = digest(given)
print("RESULT " + json.dumps(result))
"""


def test_whatever_is_built_inside_has_the_bits_and_types_of_zero3(installed):
    """Every wrapped factory, unwrapped ones, lists of fp32 buffers, nesting, skip_init and a finished module."""
    ours, stock = (
        run_with(installed, DIGEST + FACTORIES, json.dumps(flag)) for flag in ({"offload_engine": "megatrain"}, {})
    )
    assert ours == stock
    for name in ("arange", "undeclared", "linear.weight"):
        assert ours["bf16 default"][name][0] == "torch.bfloat16"
        assert ours["bf16 none"][name][0] == "torch.float32"


def test_a_parents_write_to_a_childs_parameter_takes_effect():
    """GPT-2 scales its residual projections from the parent; DeepSpeed's context loses that."""
    from transformers import AutoModelForCausalLM, GPT2Config
    from transformers.integrations import HfDeepSpeedConfig

    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    torch.manual_seed(3)
    plain = AutoModelForCausalLM.from_config(config).state_dict()
    kept = HfDeepSpeedConfig(OURS)
    torch.manual_seed(3)
    ours = AutoModelForCausalLM.from_config(config).state_dict()
    del kept
    scale = config.initializer_range / (2 * config.n_layer) ** 0.5
    assert ours["transformer.h.1.mlp.c_proj.weight"].std().item() == pytest.approx(scale, rel=0.1)
    assert plain["transformer.h.1.mlp.c_proj.weight"].std().item() == pytest.approx(scale, rel=0.1)


ACCELERATE = """
import json, sys
from accelerate import Accelerator, DeepSpeedPlugin
from transformers import LlamaForCausalLM
config = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "offload_engine": "megatrain",
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": {"device": "cpu"}},
}
accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
model = LlamaForCausalLM.from_pretrained(sys.argv[1])
print("RESULT " + json.dumps([
    accelerator.distributed_type,
    sorted({str(p.dtype) for p in model.parameters()}),
    all(p.numel() > 0 for p in model.parameters()),
    any(hasattr(p, "ds_id") for p in model.parameters()),
]))
"""


def test_accelerate_with_auto_values_loads_full_weights(checkpoints, installed):
    assert run_with(installed, ACCELERATE, checkpoints["llama"]) == ["DEEPSPEED", ["torch.bfloat16"], True, False]


@pytest.mark.parametrize("form", ["config_dict_or_path", "config", "path", "positional"])
def test_every_way_to_give_the_configuration_is_inert(form, tmp_path):
    if form == "path":
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(BF16))
        context = deepspeed.zero.Init(config_dict_or_path=str(path))
    elif form == "positional":
        context = deepspeed.zero.Init(None, None, True, None, False, BF16)
    else:
        context = deepspeed.zero.Init(**{form: BF16})
    linear = nn.functional.linear
    with context:
        built = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert isinstance(context, deepspeed.zero.Init)
    assert deepspeed.comm.is_initialized()
    assert not any(hasattr(parameter, "ds_id") for parameter in built.parameters())
    assert built[0].weight.shape == (2, 3)
    assert {parameter.dtype for parameter in built.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in built.buffers()} == {torch.bfloat16, torch.int64}
    assert nn.functional.linear is linear
    assert nn.Linear(3, 2).weight.dtype is torch.float32


def public_state() -> dict:
    """Everything that the context changes while it is active."""
    classes = {cls: dict(vars(cls)) for cls in zero_init._classes()}
    return {"torch": dict(vars(torch)), "functional": dict(vars(nn.functional)), "classes": classes}


class BreaksError(Exception):
    """What `Breaks` raises."""


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        raise BreaksError


def build_parts() -> None:
    """A plain module, one on the meta device that is never filled, and a class made inside the context."""
    nn.Linear(3, 2)
    nn.LSTM(3, 2, device="meta")
    nn.Linear(3, 2, device="meta")
    type("Late", (nn.Module,), {"__init__": lambda self: nn.Module.__init__(self)})()


@pytest.mark.parametrize("fails", [False, True])
def test_the_context_leaves_nothing_behind(fails):
    # The first context of a process also imports and builds DeepSpeed's communication.
    context = deepspeed.zero.Init(config_dict_or_path=BF16)
    before = public_state()
    expected = pytest.raises(BreaksError) if fails else contextlib.nullcontext()
    with expected, context:
        assert torch.zeros is not before["torch"]["zeros"]
        build_parts()
        if fails:
            Breaks()
    gc.collect()
    assert public_state() == before
    assert nn.Linear(3, 2).weight.dtype is torch.float32
    assert torch.Tensor([1.5, 2.5]).tolist() == [1.5, 2.5]


def test_classes_made_after_the_context_may_be_generic():
    with deepspeed.zero.Init(config_dict_or_path=BF16):
        nn.Linear(3, 2)
    kind = TypeVar("kind")
    made = types.new_class("Made", (nn.Module, Generic[kind]))
    assert made[int] is not None


def test_a_class_made_inside_stays_usable():
    with deepspeed.zero.Init(config_dict_or_path=BF16):
        late = type("Late", (nn.Linear,), {"__init__": lambda self: nn.Linear.__init__(self, 3, 2)})
        assert late().weight.dtype is torch.bfloat16
    assert late().weight.dtype is torch.float32
    assert "_old_init" not in vars(late)


def test_nested_contexts_end_one_by_one():
    with deepspeed.zero.Init(config_dict_or_path=BF16):
        with deepspeed.zero.Init(config_dict_or_path=BF16):
            inner = nn.Linear(3, 2)
        outer = nn.Linear(3, 2)
    assert (inner.weight.dtype, outer.weight.dtype) == (torch.bfloat16, torch.bfloat16)
    assert nn.Linear(3, 2).weight.dtype is torch.float32


def test_deepspeed_may_suspend_the_context_while_it_builds_an_engine():
    context = deepspeed.zero.Init(config_dict_or_path=BF16)
    before = public_state()
    with context:
        deepspeed.zero.partition_parameters.shutdown_init_context()
        assert public_state() == before
        suspended = nn.Linear(3, 2)
        deepspeed.zero.partition_parameters.restore_init_context()
        resumed = nn.Linear(3, 2)
    assert (suspended.weight.dtype, resumed.weight.dtype) == (torch.float32, torch.bfloat16)
    assert public_state() == before


def test_a_disabled_context_changes_nothing():
    with deepspeed.zero.Init(config_dict_or_path=BF16, enabled=False):
        assert nn.Linear(3, 2).weight.dtype is torch.float32


def test_a_finished_module_keeps_its_types_and_stays_whole():
    module = nn.Linear(3, 2)
    deepspeed.zero.Init(module=module, config_dict_or_path=BF16)
    assert module.weight.shape == (2, 3)
    assert module.weight.dtype is torch.float32
    assert not hasattr(module.weight, "ds_id")


def test_without_configuration_or_key_it_partitions_as_before():
    stock = {key: value for key, value in OURS.items() if key != "offload_engine"}
    for keywords in ({}, {"config_dict_or_path": stock}):
        context = deepspeed.zero.Init(mem_efficient_linear=False, **keywords)
        assert type(context) is deepspeed.zero.Init
    assert type(deepspeed.zero.Init.__new__(deepspeed.zero.Init)) is deepspeed.zero.Init


def test_a_refused_key_is_said_before_weights_load():
    nvme = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}
    with pytest.raises(EngineConfigError, match=r"offload_param.device = 'nvme'"):
        deepspeed.zero.Init(config_dict_or_path={**OURS, "zero_optimization": nvme})
    with pytest.raises(EngineConfigError, match=r"offload_engine = 'megatrian'"):
        deepspeed.zero.Init(config_dict_or_path={**OURS, "offload_engine": "megatrian"})


def test_other_subclasses_are_refused_by_name():
    own = type("OwnInit", (deepspeed.zero.Init,), {})
    with pytest.raises(EngineConfigError, match=r"OwnInit has nothing to do"):
        own(config_dict_or_path=OURS)


def test_a_changed_signature_is_shown():
    class Changed:
        def __init__(self, config_dict_or_path=None, module=None):
            pass

    with pytest.raises(UnsupportedVersionError, match=r"\(self, config_dict_or_path=None, module=None\)"):
        zero_init._choose_class(Changed, Changed, Changed, (OURS,), {})
    stock = deepspeed.zero.Init
    Changed.__init__ = stock.__init__
    with pytest.raises(UnsupportedVersionError, match=r"no method _post_init_method and no method patch_init"):
        zero_init._choose_class(Changed, Changed, Changed, (), {"config": OURS})
    assert zero_init._choose_class(Changed, object, Changed, ({"train_batch_size": 1},), {}) is Changed
