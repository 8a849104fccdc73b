"""Unit tests of megatrain_ds.telemetry."""
