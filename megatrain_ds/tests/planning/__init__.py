"""Unit tests of megatrain_ds.planning."""
