"""Unit tests of megatrain_ds.memory."""
