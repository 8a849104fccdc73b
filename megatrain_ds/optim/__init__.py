"""The host optimizer: update kernels and the workers that run them behind the device's compute."""
