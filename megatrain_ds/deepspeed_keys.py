"""The table of DeepSpeed's own keys: which are refused by name, and which have no effect.

Data only; `compatibility` applies it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatrain_ds.config import BLOCK_KEY


@dataclass(frozen=True)
class KeyRule:
    """What is said of one DeepSpeed key whose value is not among the harmless ones.

    Attributes:
        key: Path of the key in ds_config.json, as users write it.
        attribute: Path of the value below the parsed `DeepSpeedConfig`; "json:" before it reads the written keys,
            for what DeepSpeed does not parse.
        harmless: Values that ask for nothing; an absent key and None always ask for nothing.
        reason: Why another value is refused, or has no effect.
        action: What to write instead.
    """

    key: str
    attribute: str
    harmless: tuple[Any, ...]
    reason: str
    action: str


_OFF = (False,)
_NO_HOST_COPY_BELOW_32_BITS = "master weights, gradients and moments are kept in fp32 on the host"
_ONE_RANK = "nothing is communicated on one rank"
_QUANTIZED = "weights and gradients travel in their own type, never quantized"
_LAYERS_SKIPPED_OR_CUT = "it changes the model's inputs or layers from inside DeepSpeed's forward"
_NOT_NVME = "weights and optimizer state live in host memory, not on NVMe"
_WRITER = "checkpoints are written by this engine, to a temporary name that is renamed when complete"

REFUSED: tuple[KeyRule, ...] = (
    KeyRule(
        "zero_optimization.stage",
        "zero_config.stage",
        (3,),
        "streaming takes the place of ZeRO stage 3 offload, and scripts load and save by that stage",
        'Set "stage": 3 in a "zero_optimization" block; without the block DeepSpeed reads 0',
    ),
    KeyRule(
        "zero_optimization.offload_param.device",
        "zero_config.offload_param.device",
        ("none", "cpu"),
        _NOT_NVME,
        'Set "device": "cpu"',
    ),
    KeyRule(
        "zero_optimization.offload_optimizer.device",
        "zero_config.offload_optimizer.device",
        ("none", "cpu"),
        _NOT_NVME,
        'Set "device": "cpu"',
    ),
    KeyRule(
        "zero_optimization.offload_optimizer.ratio",
        "zero_config.offload_optimizer.ratio",
        (1.0,),
        "the whole update runs on the host, partial offload is not supported",
        "Remove it or set 1.0",
    ),
    KeyRule(
        "zero_optimization.offload_optimizer.super_offload",
        "zero_config.offload_optimizer.super_offload",
        _OFF,
        "the host update is already overlapped here, by another scheme",
        "Remove it",
    ),
    KeyRule(
        "zero_optimization.zenflow",
        "zero_config.zenflow",
        (),
        "every step is exact here, none is delayed or partial",
        "Remove the block",
    ),
    KeyRule(
        "zero_optimization.zero_hpz_partition_size",
        "zero_config.zero_hpz_partition_size",
        (0, 1),
        "parameters are not partitioned over ranks",
        "Remove it or set 1",
    ),
    *(
        KeyRule(f"zero_optimization.{name}", f"zero_config.{name}", _OFF, _QUANTIZED, "Remove it or set false")
        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    ),
    KeyRule(
        "zero_optimization.mics_shard_size",
        "zero_config.mics_shard_size",
        (-1, 0, 1),
        "parameters are not sharded over ranks",
        "Remove it",
    ),
    KeyRule(
        "zero_optimization.mics_hierarchical_params_gather",
        "zero_config.mics_hierarchical_params_gather",
        _OFF,
        "parameters are not sharded over ranks",
        "Remove it",
    ),
    KeyRule("zero_optimization.zeropp_loco_param", "zero_config.zeropp_loco_param", ({},), _QUANTIZED, "Remove it"),
    KeyRule(
        "hybrid_engine.enabled",
        "hybrid_engine.enabled",
        _OFF,
        "generation runs on the streamed model itself",
        "Remove the block",
    ),
    KeyRule(
        "tensor_parallel.autotp_size",
        "tensor_parallel_config.autotp_size",
        (0, 1),
        "a unit's weights are not split over ranks",
        "Remove the block or set 1",
    ),
    KeyRule(
        "compile.deepcompile",
        "compile_config.deepcompile",
        _OFF,
        "DeepCompile schedules ZeRO-3's own gathers, which do not exist here",
        "Remove it",
    ),
    KeyRule(
        "bf16.bf16_master_weights_and_grads",
        "bfloat16_config.bf16_master_weights_and_grads",
        _OFF,
        _NO_HOST_COPY_BELOW_32_BITS,
        "Remove it",
    ),
    KeyRule(
        "bf16.bf16_optimizer_states",
        "bfloat16_config.bf16_optimizer_states",
        _OFF,
        _NO_HOST_COPY_BELOW_32_BITS,
        "Remove it",
    ),
    KeyRule(
        "fp16.fp16_master_weights_and_grads",
        "float16_config.fp16_master_weights_and_grads",
        _OFF,
        _NO_HOST_COPY_BELOW_32_BITS,
        "Remove it",
    ),
    KeyRule(
        "fp16.auto_cast",
        "float16_config.auto_cast",
        _OFF,
        "inputs reach the model as the script passes them",
        "Remove it and cast the inputs in the script",
    ),
    KeyRule(
        "torch_autocast.enabled",
        "torch_autocast_enabled",
        _OFF,
        "weights stream in the compute type, not in fp32 beside an autocast copy",
        'Remove the block and set "bf16": {"enabled": true}',
    ),
    KeyRule("data_efficiency.enabled", "data_efficiency_enabled", _OFF, _LAYERS_SKIPPED_OR_CUT, "Remove the block"),
    KeyRule(
        "curriculum_learning.enabled", "curriculum_enabled_legacy", _OFF, _LAYERS_SKIPPED_OR_CUT, "Remove the block"
    ),
    KeyRule("progressive_layer_drop.enabled", "pld_enabled", _OFF, _LAYERS_SKIPPED_OR_CUT, "Remove the block"),
    KeyRule(
        "compression_training",
        "json:compression_training",
        ({},),
        "compression rewrites layers while they train",
        "Remove the block",
    ),
    KeyRule(
        "eigenvalue.enabled", "json:eigenvalue.enabled", _OFF, "it reads partitioned gradients", "Remove the block"
    ),
    KeyRule(
        "weight_quantization",
        "weight_quantization_config",
        (),
        _QUANTIZED,
        "Remove the block",
    ),
    KeyRule("amp.enabled", "amp_enabled", _OFF, "Apex keeps weights of its own", 'Remove the block and use "bf16"'),
    KeyRule(
        "sparse_gradients", "sparse_gradients_enabled", _OFF, "gradients leave the device as dense tensors", "Remove it"
    ),
    KeyRule("graph_harvesting", "graph_harvesting", _OFF, "the layer loop is not one captured graph", "Remove it"),
    KeyRule(
        "sequence_parallel_size",
        "json:sequence_parallel_size",
        (0, 1),
        "one rank computes whole sequences for now",
        "Remove it or set 1",
    ),
    KeyRule("elasticity.enabled", "elasticity_enabled", _OFF, "the world size is fixed at one for now", "Remove it"),
    KeyRule(
        "autotuning.enabled",
        "autotuning_config.enabled",
        _OFF,
        "the tuner searches ZeRO settings that have no effect here",
        "Remove the block",
    ),
    KeyRule(
        "managed_gradient_accumulation",
        "managed_gradient_accumulation",
        (True,),
        "the end of a step is the accumulation boundary, which must be counted or set",
        "Remove it, or call set_gradient_accumulation_boundary",
    ),
    KeyRule(
        "expert_parallel.enabled",
        "expert_parallel_config.enabled",
        _OFF,
        "experts are streamed with their unit, not placed on ranks",
        "Remove the block",
    ),
    KeyRule(
        "checkpoint.load_universal",
        "load_universal_checkpoint",
        _OFF,
        "universal checkpoints cannot be loaded for now",
        "Remove it and load the original checkpoint",
    ),
    KeyRule("checkpoint.writer", "checkpoint_config.writer", (), _WRITER, "Remove it"),
    KeyRule("nebula.enabled", "nebula_config.enabled", _OFF, _WRITER, "Remove the block"),
    KeyRule("datastates_ckpt", "datastates_config.enabled", _OFF, _WRITER, "Remove the block"),
)
"""Keys that would ask for something this engine does not do."""

WITHOUT_EFFECT: tuple[KeyRule, ...] = (
    KeyRule("prescale_gradients", "prescale_gradients", _OFF, _ONE_RANK, "Remove it"),
    KeyRule("gradient_predivide_factor", "gradient_predivide_factor", (1.0,), _ONE_RANK, "Remove it"),
    KeyRule("communication_data_type", "communication_data_type", (), _ONE_RANK, "Remove it"),
    KeyRule(
        "zero_optimization.offload_param.pin_memory",
        "zero_config.offload_param.pin_memory",
        (True,),
        "host memory is pinned by this engine's own setting",
        f'Set "{BLOCK_KEY}": {{"pin_memory": false}}',
    ),
    KeyRule(
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_config.offload_optimizer.pin_memory",
        (True,),
        "host memory is pinned by this engine's own setting",
        f'Set "{BLOCK_KEY}": {{"pin_memory": false}}',
    ),
    KeyRule(
        "zero_optimization.leaf_module",
        "json:zero_optimization.leaf_module",
        ({},),
        "a unit's weights are always fetched as a whole",
        f'Remove it, or name the blocks in "{BLOCK_KEY}": {{"units": [...]}}',
    ),
    KeyRule(
        "bf16.immediate_grad_update",
        "bfloat16_config.immediate_grad_update",
        _OFF,
        "gradients leave each unit as its backward ends",
        "Remove it",
    ),
    KeyRule("pipeline", "json:pipeline", ({},), "the model is no PipelineModule", "Remove the block"),
)
"""Keys that change nothing here although their user may think so; each warns."""
