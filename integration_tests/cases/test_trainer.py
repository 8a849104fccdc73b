"""Hugging Face's Trainer cuts one batch into micro-batches: rows of unequal length weigh by their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from integration_tests.cases.engines import Tensors, ds_config, largest, masters
from integration_tests.cases.engines import differing as differences
from integration_tests.cases.models import llama

pytestmark = pytest.mark.usefixtures("forget_frameworks")

VALID = (3, 60, 17, 44, 5, 31, 22)
ROWS = len(VALID)


def rows() -> list[dict[str, torch.Tensor]]:
    """Seven rows of 64 tokens, 3 to 60 of them with a label."""
    ids = torch.randint(0, 40, (ROWS, 64), generator=torch.Generator().manual_seed(4))
    labels = ids.clone()
    for row, valid in enumerate(VALID):
        labels[row, valid:] = -100
    return [{"input_ids": ids[row], "labels": labels[row]} for row in range(ROWS)]


class KeepMasters(TrainerCallback):
    """Copies masters, norms and counts while the engine is alive."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.masters: Tensors = {}
        self.engine_steps = 0
        self.engine: Any = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "grad_norm" in logs:
            self.norms.append(float(logs["grad_norm"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.masters, self.engine_steps = masters(self.engine), self.engine.global_steps


class UnshuffledTrainer(Trainer):
    """Rows in their order, so that cuts hold the same rows."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


def train(folder: Path, *, micro_batch: int, accumulation: int, flag: bool = True) -> KeepMasters:
    """One epoch."""
    torch.manual_seed(7)
    config = ds_config(
        flag=flag,
        train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto",
        gradient_clipping="auto",
        optimizer={"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    )
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed=config,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=1,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    kept = KeepMasters()
    trainer = UnshuffledTrainer(
        model=llama(max_position_embeddings=64), args=arguments, train_dataset=rows(), callbacks=[kept]
    )

    class FindEngine(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kept.engine = trainer.model_wrapped

    trainer.add_callback(FindEngine())
    trainer.train()
    expected = "MegaTrainEngine" if flag else "DeepSpeedEngine"
    assert type(kept.engine).__name__ == expected
    kept.engine.destroy()
    return kept


@pytest.mark.parametrize("accumulation", [ROWS, 4])
def test_rows_weigh_by_their_tokens_however_they_are_cut(device, tmp_path, accumulation) -> None:
    """Seven rows at once, or row by row; at four a step the last three make a step of their own."""
    ours = train(tmp_path, micro_batch=1, accumulation=accumulation)
    whole = train(tmp_path, micro_batch=ROWS if accumulation == ROWS else 4, accumulation=1)
    stock = train(tmp_path, micro_batch=1, accumulation=accumulation, flag=False)
    steps = 1 if accumulation == ROWS else 2
    assert ours.engine_steps == whole.engine_steps == stock.engine_steps == steps
    assert ours.norms == pytest.approx(stock.norms, rel=1e-5)
    assert ours.norms == pytest.approx(whole.norms, rel=1e-5)
    moved = 1e-2 * steps
    assert largest(differences(ours.masters, stock.masters)) < 0.02 * moved
    assert largest(differences(ours.masters, whole.masters)) < 0.02 * moved
