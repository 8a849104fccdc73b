"""Unit tests of megatrain_ds.engine."""
