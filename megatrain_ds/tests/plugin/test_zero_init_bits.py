"""What is built or loaded in `zero.Init` with the flag has the types and bits that stock ZeRO-3 gives it."""

from __future__ import annotations

import json

import pytest
import torch

from megatrain_ds.tests.programs import read_result, run_program
from megatrain_ds.tests.releases import INITIALIZED_IN_ZERO_INIT

OURS = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "offload_engine": "megatrain"}

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
    compared = [name for name in stock["weights"] if INITIALIZED_IN_ZERO_INIT or not name.endswith("fresh")]
    assert len(compared) >= 18
    assert {name: ours["weights"][name] for name in compared} == {name: stock["weights"][name] for name in compared}
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
