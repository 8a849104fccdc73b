"""What the three example programs share: a small model, a text that every machine has, and a record of a run.

Knows nothing about any offload engine: the programs are ordinary user code, and only the ds_config decides what runs.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sysconfig
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    set_seed,
)

BYTE_VOCABULARY = 256


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that every route understands."""
    parser.add_argument("--ds-config", required=True, help="path of the DeepSpeed configuration (JSON)")
    parser.add_argument("--model", choices=sorted(MODEL_CONFIGS), default="llama")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--length", type=int, default=64, help="bytes in one block of text")
    parser.add_argument("--micro-batch", type=int, default=4, help="blocks in one micro-batch")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--reverse-rows", action="store_true", help="same batches, rows in reverse order")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--out", required=True, help="file that receives the record of the run (JSON)")


def llama_config(hidden: int, layers: int) -> PretrainedConfig:
    """A Llama decoder with grouped heads and an untied head."""
    return LlamaConfig(
        vocab_size=BYTE_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        use_cache=False,
    )


def qwen2_config(hidden: int, layers: int) -> PretrainedConfig:
    """A Qwen2 decoder (biases in attention) whose head is tied to the embedding."""
    return Qwen2Config(
        vocab_size=BYTE_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        use_cache=False,
    )


def gpt2_config(hidden: int, layers: int) -> PretrainedConfig:
    """A GPT-2 decoder with a tied head and no dropout, so that two engines can be compared."""
    return GPT2Config(
        vocab_size=BYTE_VOCABULARY,
        n_embd=hidden,
        n_layer=layers,
        n_head=4,
        n_positions=512,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )


MODEL_CONFIGS = {"gpt2": gpt2_config, "llama": llama_config, "qwen2": qwen2_config}


def build_model(args: argparse.Namespace, attention: str) -> PreTrainedModel:
    """A randomly initialised fp32 model; the same seed gives the same weights whatever `attention` is."""
    set_seed(args.seed)
    config = MODEL_CONFIGS[args.model](args.hidden, args.layers)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


class StandardLibraryText(Dataset):
    """The bytes of Python's own sources, in sorted file order, cut into blocks that do not overlap.

    Each item is `{"input_ids": int64[length], "labels": int64[length]}`.

    Raises:
        RuntimeError: if the installed standard library holds fewer sources than `num_blocks` blocks need.
    """

    def __init__(self, num_blocks: int, length: int) -> None:
        needed = num_blocks * length
        text = bytearray()
        root = Path(sysconfig.get_path("stdlib"))
        for source in sorted(root.glob("*.py")):
            if len(text) >= needed:
                break
            text += source.read_bytes()
        if len(text) < needed:
            raise RuntimeError(
                f"{root} holds {len(text)} bytes of .py sources, but {num_blocks} blocks of {length} bytes need "
                f"{needed}: ask for fewer steps or shorter blocks."
            )
        self.blocks = torch.frombuffer(text[:needed], dtype=torch.uint8).view(num_blocks, length).long()

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index].clone()}


def text_for(args: argparse.Namespace, grad_accum: int) -> StandardLibraryText:
    """Exactly the blocks that the run consumes, each once."""
    return StandardLibraryText(args.steps * grad_accum * args.micro_batch, args.length)


def collate(items: list[dict[str, torch.Tensor]], reverse: bool = False) -> dict[str, torch.Tensor]:
    """Stacks blocks into a batch; `reverse` changes the order of the rows and nothing that the mathematics sees."""
    rows = items[::-1] if reverse else items
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


class Record:
    """Collects one run's figures, step by step."""

    def __init__(self, **labels: object) -> None:
        self.labels = labels
        self.losses: list[float] = []
        self.grad_norms: list[float | None] = []
        self.learning_rates: list[float] = []
        self.step_times_s: list[float] = []
        self._last_s = time.perf_counter()

    def start_step(self) -> None:
        """Starts the clock of the next step."""
        self._last_s = time.perf_counter()

    def add(self, loss: float, grad_norm: float | torch.Tensor | None, learning_rate: float) -> None:
        """Adds one optimizer step; `grad_norm` is the norm before clipping, or None where the engine gives none."""
        self.step_times_s.append(time.perf_counter() - self._last_s)
        self.losses.append(float(loss))
        self.grad_norms.append(None if grad_norm is None else float(grad_norm))
        self.learning_rates.append(float(learning_rate))

    def finish(self, engine: torch.nn.Module) -> dict[str, object]:
        """The record as plain data; `engine` is what DeepSpeed returned."""
        return {
            **self.labels,
            "engine": type(engine).__name__,
            "losses": self.losses,
            "grad_norms": self.grad_norms,
            "learning_rates": self.learning_rates,
            "step_times_s": self.step_times_s,
            "median_step_s": statistics.median(self.step_times_s),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "peak_device_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        }


def write_json(path: str, content: object) -> None:
    """Writes `content` to `path`, making its folder."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content, indent=1))
