"""The result of a profile: a point per batch size, and the transition from memory- to compute-bound."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from inferry.engine.profiling.kernels import idle_share
from inferry.engine.profiling.roofline import DevicePeak, StepWork, bound_of

FORMAT = "inferry-profile/1"


class Point(Struct, frozen=True, kw_only=True):
    """One batch size. `step_s`: median of measured steps. `seconds_by_class` sums to it.

    `memory_s` and `compute_s` are the least times for `moved_bytes` and `flops`; shares are of the device's peaks.
    """

    phase: Literal["decode", "prefill"]
    batch: int
    tokens: int
    step_s: float
    tokens_per_s: float
    flops: float
    moved_bytes: float
    bandwidth_share: float
    compute_share: float
    memory_s: float
    compute_s: float
    bound: str
    seconds_by_class: dict[str, float]


class Profile(Struct, frozen=True, kw_only=True):
    """A profile of one model on one device.

    `roofline_transition`: the least batch size at which a decode step is compute-bound by its operations and bytes,
    None if no batch size is. `product_transition` is that of products with weights alone, without attention, and
    `measured_product_transition` the batch size from which their measured time grows with the batch, None if it does
    not up to the largest one.
    """

    format: str = FORMAT
    model: str
    device: str
    device_name: str
    dtype: str
    is_random: bool
    at: str
    command: str = ""
    versions: dict[str, str | None] = {}
    settings: dict[str, Any]
    dimensions: dict[str, int]
    weight_bytes: int
    peak: DevicePeak
    points: tuple[Point, ...]
    roofline_transition: int | None
    product_transition: int
    measured_product_transition: int | None

    def phase(self, name: str) -> list[Point]:
        return [point for point in self.points if point.phase == name]


def make_point(
    phase: Literal["decode", "prefill"],
    batch: int,
    tokens: int,
    step_s: float,
    work: StepWork,
    peak: DevicePeak,
    seconds_by_class: Mapping[str, float],
) -> Point:
    memory_s, compute_s = peak.seconds(work)
    return Point(
        phase=phase,
        batch=batch,
        tokens=tokens,
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        flops=work.flops,
        moved_bytes=work.moved_bytes,
        bandwidth_share=memory_s / step_s,
        compute_share=compute_s / step_s,
        memory_s=memory_s,
        compute_s=compute_s,
        bound=bound_of(work, peak, idle_share(seconds_by_class)),
        seconds_by_class=dict(seconds_by_class),
    )


def to_json(profile: Profile) -> bytes:
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"
