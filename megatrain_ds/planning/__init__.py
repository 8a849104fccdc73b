"""The byte model of host and device memory, and the checks made before anything is allocated."""
