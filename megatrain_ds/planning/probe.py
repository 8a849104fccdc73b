"""What the machine offers, as a process inside a container must read it: not from the host's totals."""

from __future__ import annotations

import resource
from pathlib import Path

_V2_ROOT = Path("/sys/fs/cgroup")
_V1_ROOT = Path("/sys/fs/cgroup/memory")


def available_host_bytes(meminfo: Path = Path("/proc/meminfo"), own_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes this process may still use: the kernel's estimate, cut to each enclosing control group's rest.

    Args:
        meminfo: Where the kernel states `MemAvailable`.
        own_cgroup: Where it names this process's control groups.
    """
    available = next(
        int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")
    )
    return min([available, *_cgroup_rests(own_cgroup)])


def memlock_limit_bytes() -> int | None:
    """Return the soft limit on locked memory, None for unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _cgroup_rests(own_cgroup: Path) -> list[int]:
    """Return limit minus use for every control group above this process that has a limit; cache counts as free."""
    try:
        lines = own_cgroup.read_text().splitlines()
    except OSError:
        return []
    rests = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            rests += _walk_up(_V2_ROOT, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            rests += _walk_up(_V1_ROOT, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return rests


def _walk_up(root: Path, path: str, limit_name: str, use_name: str, cache_name: str) -> list[int]:
    """Read each group from `path` up to `root`; a container sees its own group mounted at the root."""
    group = root / path.lstrip("/")
    rests = []
    for folder in [group, *group.parents]:
        if folder == root or root in folder.parents:
            rests += _read_rest(folder, limit_name, use_name, cache_name)
    return rests


def _read_rest(folder: Path, limit_name: str, use_name: str, cache_name: str) -> list[int]:
    try:
        limit = (folder / limit_name).read_text().strip()
        use = int((folder / use_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    if limit == "max":
        return []
    return [max(0, int(limit) - use + int(stat.get(cache_name, 0)))]
