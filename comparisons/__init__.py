"""Measurements of this engine beside other systems, on the user's own machine."""
