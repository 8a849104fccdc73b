"""Tests of the host optimizer."""
