"""Memory of this machine for a process: physical, and limited by its control group (v2 or v1)."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class DeviceMemory(NamedTuple):
    """Bytes of a device: all of them, and those that a new allocation can use."""

    total: int
    available: int


def cpu_memory(read: Callable[[str], str | None] | None = None) -> DeviceMemory:
    """`read` returns the text of a file, or None without it; for tests."""
    read = read or _read
    fields = dict(line.split(":") for line in (read("/proc/meminfo") or "").splitlines() if ":" in line)
    if "MemTotal" not in fields or "MemAvailable" not in fields:
        raise OSError("/proc/meminfo does not say how much memory is available")
    memory = DeviceMemory(_kib(fields["MemTotal"]), _kib(fields["MemAvailable"]))
    for limit_file, used_file, stat_file in _CONTROL_GROUPS:
        limit, used = read(limit_file), read(used_file)
        if limit is None or used is None or not limit.strip().isdigit():
            continue
        # Cached file pages are reclaimed before the limit is exceeded.
        statistics = dict(line.split() for line in (read(stat_file) or "").splitlines())
        reclaimable = int(statistics.get("inactive_file", 0)) + int(statistics.get("active_file", 0))
        left = int(limit) - int(used) + reclaimable
        memory = DeviceMemory(min(memory.total, int(limit)), max(0, min(memory.available, left)))
    return memory


_CONTROL_GROUPS = [
    (f"/sys/fs/cgroup/{limit}", f"/sys/fs/cgroup/{used}", f"/sys/fs/cgroup/{statistics}")
    for limit, used, statistics in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    )
]


def _kib(field: str) -> int:
    return int(field.split()[0]) << 10


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None
