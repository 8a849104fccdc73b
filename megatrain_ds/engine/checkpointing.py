"""What DeepSpeed's engine does about checkpoints, on values that lie unit by unit in host memory."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain_ds.checkpoint import deepspeed_layout, rng
from megatrain_ds.checkpoint.archive import write_archive
from megatrain_ds.checkpoint.atomic import recover, replace_file, replacing_file, replacing_folder
from megatrain_ds.checkpoint.saved_state import read_checkpoint
from megatrain_ds.engine.checkpoint_state import CheckpointState
from megatrain_ds.errors import CheckpointError, explain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deepspeed.runtime.engine import DeepSpeedEngine

    _Engine = DeepSpeedEngine
else:
    _Engine = object

logger = logging.getLogger("megatrain_ds")


class CheckpointingMixin(_Engine):
    """Saves and loads ZeRO-3 checkpoints of one rank; mixed into `MegaTrainEngine`."""

    _saved_rng_state: dict[str, Any] | None = None

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a checkpoint in ZeRO-3's layout; it appears whole or not at all.

        Args:
            save_dir: folder of all checkpoints.
            tag: name of this one; `global_step<n>` by default. An older one of that name is replaced when this one is
                complete.
            client_state: further picklable values to give back from `load_checkpoint`.
            save_latest: name this checkpoint in the file `latest`.
            exclude_frozen_parameters: leave out parameters that no optimizer steps.

        Raises:
            CheckpointError: gradients of an unfinished step are held, the client state uses a reserved key, or a file
                cannot be written; an older checkpoint is as it was.
        """
        if not save_dir:
            raise ValueError(f"save_dir = {save_dir!r}: has to name a folder. Pass one.")
        client_state = client_state or {}
        state = CheckpointState(self)
        self._check_saveable(state, client_state)
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        state.settle()
        target = Path(save_dir) / name
        try:
            with replacing_folder(target, is_replaced=deepspeed_layout.is_state_file) as folder:
                model = {**state.model_content(exclude_frozen=exclude_frozen_parameters), **client_state}
                write_archive(folder / deepspeed_layout.MODEL_FILE, model)
                optimizer_name = deepspeed_layout.optimizer_file(bf16=self.bfloat16_enabled())
                write_archive(folder / optimizer_name, state.optimizer_content())
                self._place_recovery_scripts(folder, Path(save_dir))
            if save_latest:
                replace_file(Path(save_dir) / "latest", name.encode())
        except OSError as error:
            rule = f"could not be written ({error})"
            action = "Free space or choose another save_dir; checkpoints saved earlier are as they were"
            raise CheckpointError(explain("checkpoint", str(target), rule, action)) from error
        logger.info("megatrain: saved checkpoint %s", target)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., None] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of this engine or of stock ZeRO-3, into a new or a trained engine.

        The weights always reach the masters at full precision, and the next forward. Gradients of an unfinished step
        are dropped. The state of the random generators is read, but set by `restore_rng_state` alone.

        Args:
            load_dir: folder of all checkpoints.
            tag: which one; by default what the file `latest` names.
            load_module_strict: refuse missing and unexpected names.
            load_optimizer_states: restore moments, step counts, hyper-parameters and loss scale.
            load_lr_scheduler_states: restore the learning-rate scheduler.
            load_module_only: restore weights and buffers, and nothing else.
            custom_load_fn: called with `src` (every weight by name, full shape) and `dst` (the module) instead of
                loading weights by name.

        Returns:
            The path of the model file and the client state, or (None, None) when there is no file `latest`.

        Raises:
            CheckpointError: it cannot be read or does not fit; the engine is as it was.
        """
        found = _read_tag(Path(load_dir), tag)
        if found is None:
            return None, None
        folder = Path(load_dir) / found
        recover(folder)
        saved = read_checkpoint(folder, bf16=self.bfloat16_enabled())
        state, by_name = CheckpointState(self), custom_load_fn is None
        with_state = load_optimizer_states and not load_module_only
        assignments = []
        if by_name or with_state:
            assignments = state.plan(saved, strict=load_module_strict and by_name, with_state=with_state)
        if load_lr_scheduler_states and not load_module_only:
            state.load_scheduler(saved)
        state.drop_gradients()
        if custom_load_fn is not None:
            custom_load_fn(src=saved.weights(), dst=self.module)
        state.apply(saved, assignments, with_state=with_state)
        if by_name:
            state.load_buffers(saved)
        if not load_module_only:
            state.load_counters(saved)
        self._saved_rng_state = saved.model.get(deepspeed_layout.OWN_KEY, {}).get("rng_state")
        hidden = _hidden_keys(
            module_only=load_module_only, scheduler=load_lr_scheduler_states, optimizer=load_optimizer_states
        )
        client_state = {key: value for key, value in saved.model.items() if key not in hidden}
        # Copied, so that no tensor of the caller's keeps the file mapped.
        return str(folder / deepspeed_layout.MODEL_FILE), copy.deepcopy(client_state)

    def restore_rng_state(self) -> None:
        """Set python's, numpy's and torch's random generators to where they were when the loaded checkpoint was saved.

        Stock DeepSpeed leaves them alone on load, and so does `load_checkpoint`; a plain training loop calls this after
        it to go on exactly. (Trainer and Accelerate save and restore them on their own.)

        Raises:
            CheckpointError: no checkpoint with a state of the generators was loaded.
        """
        if self._saved_rng_state is None:
            rule = "no checkpoint that holds it was loaded"
            raise CheckpointError(explain("random state", None, rule, "Call load_checkpoint first"))
        rng.restore(self._saved_rng_state)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the weights in compute precision as one file for `torch.load`; see `DeepSpeedEngine.save_16bit_model`.

        Returns:
            False, with nothing saved, when stage3_gather_16bit_weights_on_model_save is off.
        """
        path = Path(save_dir) / save_filename
        if not self.zero_gather_16bit_weights_on_model_save():
            logger.info("megatrain: %s not saved: stage3_gather_16bit_weights_on_model_save is false", path)
            return False
        state = CheckpointState(self)
        state.settle()
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(path) as temporary:
            write_archive(temporary, state.weights(exclude_frozen=exclude_frozen_parameters))
        return True

    def _get_shared_params(self) -> dict[str, str]:
        return CheckpointState(self).shared_names()

    def _check_saveable(self, state: CheckpointState, client_state: Mapping[str, Any]) -> None:
        if state.holds_gradients:
            rule = "gradients were gathered that no step() has used yet, and a checkpoint does not hold gradients"
            action = "Save after step(), at a gradient accumulation boundary"
            raise CheckpointError(explain("micro_steps", self.micro_steps, rule, action))
        reserved = sorted(deepspeed_layout.RESERVED_KEYS & client_state.keys())
        if reserved:
            rule = "are keys of the checkpoint itself"
            raise CheckpointError(explain("client_state keys", reserved, rule, "Choose other names"))

    def _place_recovery_scripts(self, folder: Path, save_dir: Path) -> None:
        self._copy_recovery_script(str(folder))
        for script in folder.glob("*.py"):
            script.replace(save_dir / script.name)


def _read_tag(folder: Path, tag: str | None) -> str | None:
    if tag is not None:
        return str(tag)
    latest = folder / "latest"
    if latest.is_file():
        return latest.read_text().strip()
    logger.warning("megatrain: there is no file %s: nothing loaded. Pass tag to load a checkpoint by its name.", latest)
    return None


def _hidden_keys(*, module_only: bool, scheduler: bool, optimizer: bool) -> set[str]:
    # What DeepSpeed keeps out of the client state; frozen weights besides, which may be most of a model.
    hidden = {"module", "frozen_param_fragments", deepspeed_layout.OWN_KEY}
    if not module_only:
        hidden |= {"skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd"}
    if scheduler:
        hidden.add("lr_scheduler")
    if optimizer:
        hidden.add("optimizer")
    return hidden
