"""What a DeepSpeed program needs around it to run alone in one process: variables, a port, and a clean-up.

Knows nothing about the program nor about the engine that it runs on.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch

from megatrain_ds.planning.probe import usable_cpus

SHARED_MEMORY = Path("/dev/shm")


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_variables(port: int) -> dict[str, str]:
    """Return the variables by which a launcher would say: one process, rank 0, rendezvous at `port`."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def program_environment() -> dict[str, str]:
    """Return the caller's environment for an offline program, on the CPU accelerator where there is no CUDA device."""
    environment = dict(os.environ)
    environment.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    # Accelerate prefers these over its file, and turns DeepSpeed into DDP on a CPU.
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        environment.pop(name, None)
    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"
        environment.setdefault("OMP_NUM_THREADS", str(usable_cpus()))
    return environment


def remove_shared_buffers(port: int) -> None:
    """Remove the 64 MiB files that DeepSpeed's CPU collectives left behind in the run on `port`, and no others."""
    for path in SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        path.unlink(missing_ok=True)
