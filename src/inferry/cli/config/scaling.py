"""The `scaling` section of the configuration."""

from collections.abc import Iterator, Mapping

from msgspec import Struct

from inferry.cli.config.checks import check_positive, check_range
from inferry.prediction.scaling import ScalingPolicy


class ScalingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many workers a group should have: `GET /admin/scale`, `inferry_desired_workers`, and replicas on Ray."""

    target_wait_s: float = 10.0
    """Waiting work, in seconds of engine time, is to be drained within this many seconds. Smaller values start more
    workers."""
    utilization: float = 0.8
    """Part of the workers' capacity that running calls should use."""
    scale_down_after_s: float = 300.0
    """Workers are stopped when fewer have been enough for this many seconds."""

    def policy(self, limits: Mapping[str, tuple[int, int]]) -> ScalingPolicy:
        """`limits`: see `ScalingPolicy`."""
        return ScalingPolicy(
            target_wait_s=self.target_wait_s,
            utilization=self.utilization,
            scale_down_after_s=self.scale_down_after_s,
            limits=limits,
        )


def check_scaling(scaling: ScalingConfig) -> Iterator[str]:
    """Error messages for invalid values."""
    yield from check_positive("scaling", scaling, "target_wait_s", "scale_down_after_s")
    yield from check_range("scaling", scaling, 0.01, 1, "utilization")
