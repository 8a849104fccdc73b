"""Unit tests of megatrain_ds.model."""
