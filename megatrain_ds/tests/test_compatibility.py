"""DeepSpeed's keys: each refused one is refused by name, and ordinary configurations pass without a word."""

from __future__ import annotations

import re
import warnings

import deepspeed
import pytest
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

import megatrain_ds.compatibility as compatibility
from megatrain_ds.compatibility import (
    HONOURED,
    IMMATERIAL,
    check_deepspeed_config,
    check_world_size,
    refuse_unsupported,
)
from megatrain_ds.deepspeed_keys import REFUSED, WITHOUT_EFFECT
from megatrain_ds.errors import EngineConfigError, MegaTrainWarning

# Written key -> (configuration that sets it, a word of the next action).
CASES = {
    "zero_optimization.stage": ({"zero_optimization": {"stage": 2}}, 'Set "stage": 3'),
    "zero_optimization.offload_param.device": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}},
        'Set "device": "cpu"',
    ),
    "zero_optimization.offload_optimizer.device": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}},
        'Set "device": "cpu"',
    ),
    "zero_optimization.offload_optimizer.ratio": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        "set 1.0",
    ),
    "zero_optimization.offload_optimizer.super_offload": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        "Remove it",
    ),
    "zero_optimization.zenflow": ({"zero_optimization": {"stage": 3, "zenflow": {}}}, "Remove the block"),
    "zero_optimization.zero_hpz_partition_size": (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
        "set 1",
    ),
    "zero_optimization.zero_quantized_weights": (
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
        "set false",
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": (
        {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}},
        "set false",
    ),
    "zero_optimization.zero_quantized_gradients": (
        {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
        "set false",
    ),
    "zero_optimization.mics_shard_size": ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "Remove"),
    "zero_optimization.mics_hierarchical_params_gather": (
        {"zero_optimization": {"stage": 3, "mics_hierarchical_params_gather": True}},
        "Remove",
    ),
    "zero_optimization.zeropp_loco_param": (
        {"zero_optimization": {"stage": 3, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}},
        "Remove",
    ),
    "hybrid_engine.enabled": ({"hybrid_engine": {"enabled": True}}, "Remove the block"),
    "tensor_parallel.autotp_size": ({"tensor_parallel": {"autotp_size": 2}}, "set 1"),
    "compile.deepcompile": ({"compile": {"deepcompile": True}}, "Remove"),
    "bf16.bf16_master_weights_and_grads": (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        "Remove",
    ),
    "fp16.fp16_master_weights_and_grads": (
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        "Remove",
    ),
    "fp16.auto_cast": ({"fp16": {"enabled": True, "auto_cast": True}}, "cast the inputs"),
    "torch_autocast.enabled": ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, '"bf16"'),
    "data_efficiency.enabled": ({"data_efficiency": {"enabled": True}}, "Remove the block"),
    "curriculum_learning.enabled": ({"curriculum_learning": {"enabled": True}}, "Remove"),
    "progressive_layer_drop.enabled": ({"progressive_layer_drop": {"enabled": True}}, "Remove"),
    "compression_training": (
        {"compression_training": {"weight_quantization": {"shared_parameters": {}, "different_groups": {}}}},
        "Remove",
    ),
    "eigenvalue.enabled": ({"eigenvalue": {"enabled": True}}, "Remove"),
    "weight_quantization": ({"weight_quantization": {"quantized_initialization": {"num_bits": 8}}}, "Remove"),
    "amp.enabled": ({"amp": {"enabled": True}}, "bf16"),
    "sparse_gradients": ({"sparse_gradients": True}, "Remove"),
    "graph_harvesting": ({"graph_harvesting": True}, "Remove"),
    "sequence_parallel_size": ({"sequence_parallel_size": 2}, "set 1"),
    "elasticity.enabled": (
        {
            "elasticity": {
                "enabled": True,
                "max_train_batch_size": 4,
                "micro_batch_sizes": [4],
                "min_gpus": 1,
                "max_gpus": 1,
                "ignore_non_elastic_batch_info": True,
            }
        },
        "Remove",
    ),
    "autotuning.enabled": ({"autotuning": {"enabled": True}}, "Remove the block"),
    "managed_gradient_accumulation": (
        {"managed_gradient_accumulation": False},
        "set_gradient_accumulation_boundary",
    ),
    "expert_parallel.enabled": ({"expert_parallel": {"enabled": True}}, "Remove the block"),
    "checkpoint.load_universal": ({"checkpoint": {"load_universal": True}}, "original checkpoint"),
    "checkpoint.writer": ({"checkpoint": {"writer": {"type": "FAST"}}}, "Remove"),
    "nebula.enabled": ({"nebula": {"enabled": True}}, "Remove"),
    "datastates_ckpt": ({"datastates_ckpt": {"host_cache_size": 1}}, "Remove the block"),
}
REFUSED_BY_DEEPSPEED_SINCE_0_19_8 = {
    "zero_optimization.mics_shard_size",
    "zero_optimization.mics_hierarchical_params_gather",
    "zero_optimization.zeropp_loco_param",
    "curriculum_learning.enabled",
    "progressive_layer_drop.enabled",
    "compression_training",
    "eigenvalue.enabled",
    "amp.enabled",
    "sparse_gradients",
    "graph_harvesting",
    "elasticity.enabled",
    "nebula.enabled",
}
UNKNOWN_TO_DEEPSPEED_0_18 = {"managed_gradient_accumulation", "expert_parallel.enabled"}
# DeepSpeed itself demands the first of these before the second means anything.
IMPLIED = {"bf16.bf16_optimizer_states"}

USUAL = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_allow_untested_optimizer": True,
    "wall_clock_breakdown": False,
    "aio": {"block_size": 1048576},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
        "round_robin_gradients": True,
        "memory_efficient_linear": True,
    },
}


def parse(**changes: object) -> DeepSpeedConfig:
    merged = {"train_batch_size": 4, "zero_optimization": {"stage": 3}, **changes}
    return DeepSpeedConfig({key: value for key, value in merged.items() if value is not None})


def test_every_rule_has_a_case():
    assert {rule.key for rule in REFUSED} == set(CASES) | IMPLIED


@pytest.mark.parametrize("key", CASES)
def test_a_refused_key_is_named_with_what_to_do(key):
    if key in UNKNOWN_TO_DEEPSPEED_0_18 and deepspeed.__version__.startswith("0.18."):
        pytest.skip("this DeepSpeed does not read the key")
    changes, action = CASES[key]
    with pytest.raises(DeepSpeedConfigError) as caught:
        check_deepspeed_config(parse(**changes))
    if isinstance(caught.value, EngineConfigError):
        assert str(caught.value).startswith(f"{key} = ")
        assert action in str(caught.value)
    else:
        assert key in REFUSED_BY_DEEPSPEED_SINCE_0_19_8


def test_refusals_name_the_flag_and_come_without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", MegaTrainWarning)
        with pytest.raises(EngineConfigError, match='"offload_engine": "megatrain"'):
            refuse_unsupported(parse(zero_optimization={"stage": 1}, prescale_gradients=True))


def test_the_usual_configuration_passes_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error", MegaTrainWarning)
        check_deepspeed_config(DeepSpeedConfig(USUAL))


def test_an_unfilled_clipping_value_is_refused_only_when_the_engine_is_built():
    parsed = parse(gradient_clipping="auto")
    refuse_unsupported(parsed)
    with pytest.raises(EngineConfigError, match=r"gradient_clipping = 'auto': is a number"):
        check_deepspeed_config(parsed)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("prescale_gradients", {"prescale_gradients": True}),
        ("gradient_predivide_factor", {"gradient_predivide_factor": 2.0}),
        ("communication_data_type", {"communication_data_type": "fp16"}),
        (
            "zero_optimization.offload_param.pin_memory",
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}}},
        ),
        (
            "zero_optimization.offload_optimizer.pin_memory",
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False}}},
        ),
        ("zero_optimization.leaf_module", {"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["a.B"]}}}),
        ("bf16.immediate_grad_update", {"bf16": {"enabled": True, "immediate_grad_update": True}}),
        ("pipeline", {"pipeline": {"stages": 2}}),
    ],
)
def test_a_key_without_effect_warns_by_name(key, changes):
    assert key in {rule.key for rule in WITHOUT_EFFECT}
    with pytest.warns(MegaTrainWarning) as caught:
        check_deepspeed_config(parse(**changes))
    assert [str(one.message) for one in caught if str(one.message).startswith(f"{key} = ")]


def test_every_key_of_zero_optimization_is_in_a_table():
    named = {rule.key.split(".")[1] for rule in (*REFUSED, *WITHOUT_EFFECT) if rule.key.startswith("zero_opt")}
    assert set(DeepSpeedZeroConfig.model_fields) <= named | HONOURED | IMMATERIAL


def test_a_key_that_no_table_knows_warns(monkeypatch):
    monkeypatch.setattr(compatibility, "IMMATERIAL", frozenset())
    with pytest.warns(MegaTrainWarning, match=r"zero_optimization.overlap_comm.*not known"):
        check_deepspeed_config(parse(zero_optimization={"stage": 3, "overlap_comm": True}))


def test_more_than_one_rank_is_refused_for_now():
    check_world_size(1)
    with pytest.raises(EngineConfigError, match=r"world size = 2: .*one rank for now.*--num_gpus 1"):
        check_world_size(2)


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        ({}, r"1\.0 where it is left out"),
        ({"gradient_clipping": 0.5}, "0.5"),
        ({"gradient_clipping": 0.0, "fp16": {"enabled": True}}, "fp16"),
        ({"gradient_clipping": 0.0}, None),
    ],
)
def test_a_finite_check_that_stays_on_is_told(keys, cause):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_deepspeed_config(parse(megatrain={"finite_check": False}, **keys))
    told = [str(warning.message) for warning in caught if "finite_check" in str(warning.message)]
    if not keys and parse().gradient_clipping == 0.0:
        pytest.skip("this DeepSpeed does not clip where the key is left out")
    assert len(told) == (cause is not None)
    if cause is not None:
        assert re.search(cause, told[0])
