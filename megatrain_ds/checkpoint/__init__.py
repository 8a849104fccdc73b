"""Checkpoints: ZeRO-3's layout, written piece by piece and published at once."""
