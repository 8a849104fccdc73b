"""What the machine offers, as a process inside a container must read it: not from the host's totals."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_V2_ROOT = Path("/sys/fs/cgroup")
_V1_ROOT = Path("/sys/fs/cgroup/memory")
_V1_CPU_ROOT = Path("/sys/fs/cgroup/cpu")
_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUP = Path("/proc/self/cgroup")
_STATUS = Path("/proc/self/status")


def available_host_bytes(meminfo: Path = _MEMINFO, own_cgroup: Path = _OWN_CGROUP) -> int:
    """Return the bytes this process may still use: the kernel's estimate, cut to each enclosing control group's rest.

    Args:
        meminfo: Where the kernel states `MemAvailable`.
        own_cgroup: Where it names this process's control groups.
    """
    available = next(
        int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")
    )
    rests = [
        rest
        for unified, folder in _enclosing_groups(own_cgroup, "memory", _V1_ROOT)
        for rest in (
            _memory_rest(folder, "memory.max", "memory.current", "inactive_file")
            if unified
            else _memory_rest(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
    ]
    return min([available, *rests])


def usable_cpus(own_cgroup: Path = _OWN_CGROUP) -> int:
    """Return the CPUs this process may keep busy: those it may run on, cut to each enclosing group's quota, at least 1.

    A container that is given 16 of 128 CPUs by quota may run on all of them, and stands still for most of each period
    when it does.

    Args:
        own_cgroup: Where the kernel names this process's control groups.
    """
    quotas = [
        quota
        for unified, folder in _enclosing_groups(own_cgroup, "cpu", _V1_CPU_ROOT)
        for quota in _cpu_quota(folder, unified)
    ]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def resident_bytes() -> int:
    """Return the memory of this process that is resident now, pinned memory included."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Return the most that has been resident since this program was started.

    `ru_maxrss` survives exec, and so begins at what the process that started this one had resident.
    """
    return _status_bytes("VmHWM")


def memlock_limit_bytes() -> int | None:
    """Return the soft limit on locked memory, None for unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _enclosing_groups(own_cgroup: Path, controller: str, v1_root: Path) -> Iterator[tuple[bool, Path]]:
    """Yield whether a hierarchy is unified (v2), and each folder of this process in it that may hold a limit.

    A container sees its own group mounted at the root, so every folder up to there is tried.
    """
    try:
        lines = own_cgroup.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not path.startswith("/"):
            continue
        if controllers == "" or controller in controllers.split(","):
            root = v1_root if controllers else _V2_ROOT
            group = root / path.lstrip("/")
            for folder in [group, *group.parents]:
                if folder == root or root in folder.parents:
                    yield controllers == "", folder


def _memory_rest(folder: Path, limit_name: str, use_name: str, cache_name: str) -> list[int]:
    """Limit minus use, where there is a limit; cache counts as free."""
    try:
        limit = (folder / limit_name).read_text().strip()
        use = int((folder / use_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return [] if limit == "max" else [max(0, int(limit) - use + int(stat.get(cache_name, 0)))]
    except (OSError, ValueError):
        return []


def _cpu_quota(folder: Path, unified: bool) -> list[float]:
    """CPU time over wall time, where there is a limit."""
    names = ("cpu.max",) if unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        quota, period = [word for name in names for word in (folder / name).read_text().split()]
        limited = quota not in ("max", "-1")
        return [int(quota) / int(period)] if limited else []
    except (OSError, ValueError, ZeroDivisionError):
        return []


def _status_bytes(name: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
