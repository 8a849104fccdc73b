"""Unit tests of megatrain_ds.runtime."""
