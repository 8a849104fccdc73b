"""Activation: hooks that let an unchanged DeepSpeed build this package's engine when the configuration asks for it.

PyTorch's own import reaches this package, so it stays empty and light; see `autoload`.
"""
