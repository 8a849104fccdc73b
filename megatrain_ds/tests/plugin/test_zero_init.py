"""`zero.Init` for our configuration: full tensors, of the same bits that stock ZeRO-3 loads."""

from __future__ import annotations

import json

import deepspeed
import pytest
import torch
from torch import nn

from megatrain_ds.errors import EngineConfigError, UnsupportedVersionError
from megatrain_ds.plugin import zero_init
from megatrain_ds.tests.programs import read_result, run_program

OURS = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "offload_engine": "megatrain"}
BF16 = {**OURS, "bf16": {"enabled": True}}

LOAD = """
import hashlib, json, sys
import torch, deepspeed
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig
folder, flag = sys.argv[1], json.loads(sys.argv[2])
def digest(model):
    found = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            data = parameter.data.cpu().contiguous()
            bits = hashlib.sha256(data.view(torch.uint8).numpy()).hexdigest()
            found[name] = [str(data.dtype), list(data.shape), bits]
    return found
result = {"partitioned": [], "full": [], "weights": {}}
for compute in ("fp32", "bf16", "fp16"):
    for asked in (None, "float32", "bfloat16"):
        block = {} if compute == "fp32" else {compute: {"enabled": True}}
        config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, **block, **flag}
        keep = HfDeepSpeedConfig(config)
        options = {} if asked is None else {"dtype": getattr(torch, asked)}
        model = LlamaForCausalLM.from_pretrained(folder, **options)
        result["full"].append(all(p.numel() > 0 for p in model.parameters()))
        result["partitioned"].append(any(hasattr(p, "ds_id") for p in model.parameters()))
        result["weights"][f"{compute} {asked}"] = digest(model)
        torch.manual_seed(3)
        result["weights"][f"{compute} {asked} fresh"] = digest(LlamaForCausalLM._from_config(model.config, **options))
        model.resize_token_embeddings(70)
        result["full"].append(model.get_input_embeddings().weight.numel() > 0)
print("RESULT " + json.dumps(result))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small Llama with fp32 weights, saved as safetensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(folder)
    return folder


def load(checkpoint, installed, flag: dict) -> dict:
    source = f"import sys; sys.argv = ['load', {str(checkpoint)!r}, {json.dumps(flag)!r}]\n{LOAD}"
    return read_result(run_program(source, installed))


def test_transformers_loads_full_weights_of_the_same_bits(checkpoint, installed):
    ours = load(checkpoint, installed, {"offload_engine": "megatrain"})
    stock = load(checkpoint, installed, {})
    assert not any(ours["partitioned"])
    assert all(ours["full"])
    assert all(stock["partitioned"])
    assert ours["weights"] == stock["weights"]


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


def test_accelerate_with_auto_values_loads_full_weights(checkpoint, installed):
    source = f"import sys; sys.argv = ['load', {str(checkpoint)!r}]\n{ACCELERATE}"
    assert read_result(run_program(source, installed)) == ["DEEPSPEED", ["torch.bfloat16"], True, False]


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
    assert context.enabled is False
    assert deepspeed.comm.is_initialized()
    assert not any(hasattr(parameter, "ds_id") for parameter in built.parameters())
    assert built[0].weight.shape == (2, 3)
    assert {parameter.dtype for parameter in built.parameters()} == {torch.bfloat16}
    assert built[1].running_mean.dtype is torch.float32
    assert nn.functional.linear is linear
    assert nn.Linear(3, 2).weight.dtype is torch.float32


def test_a_failure_inside_the_context_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError), deepspeed.zero.Init(config_dict_or_path=BF16):
        raise ZeroDivisionError
    assert nn.Linear(3, 2).weight.dtype is torch.float32


def test_nested_contexts_end_one_by_one():
    with deepspeed.zero.Init(config_dict_or_path=BF16):
        with deepspeed.zero.Init(config_dict_or_path=BF16):
            inner = nn.Linear(3, 2)
        outer = nn.Linear(3, 2)
    assert (inner.weight.dtype, outer.weight.dtype) == (torch.bfloat16, torch.bfloat16)
    assert nn.Linear(3, 2).weight.dtype is torch.float32


def test_a_disabled_context_changes_nothing():
    with deepspeed.zero.Init(config_dict_or_path=BF16, enabled=False):
        assert nn.Linear(3, 2).weight.dtype is torch.float32


def test_a_finished_module_is_converted_and_stays_whole():
    module = nn.Linear(3, 2)
    deepspeed.zero.Init(module=module, config_dict_or_path=BF16)
    assert module.weight.shape == (2, 3)
    assert module.weight.dtype is torch.bfloat16
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
    assert zero_init._choose_class(Changed, object, Changed, ({"train_batch_size": 1},), {}) is Changed
