"""What the machine offers: host memory that a new allocation may take."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes() -> int:
    """Bytes of host memory that can be allocated without swapping, the control group's limit included."""
    available = _meminfo("MemAvailable")
    limit, used = _read_int(_CGROUP / "memory.max"), _read_int(_CGROUP / "memory.current")
    if limit is None:
        limit, used = _read_int(_CGROUP / "memory/memory.limit_in_bytes"), _read_int(_CGROUP / "memory/memory.usage_in_bytes")
    if limit is not None and used is not None and limit < 1 << 60:
        # Page cache counts as used but is given back on demand.
        reclaimable = _cgroup_stat("inactive_file")
        available = min(available, max(limit - used + reclaimable, 0))
    return available


def _meminfo(key: str) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 62
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 1 << 62)


def _cgroup_stat(key: str) -> int:
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == key), 0)


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
