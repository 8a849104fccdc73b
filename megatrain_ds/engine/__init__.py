"""The engine and optimizer that DeepSpeed hands to its callers."""

from megatrain_ds.engine.engine import MegaTrainEngine
from megatrain_ds.engine.optimizer import MegaTrainOptimizer

__all__ = ["MegaTrainEngine", "MegaTrainOptimizer"]
