"""Streaming at run time: slots, schedule, gradient drain, and the forward of a unit."""
