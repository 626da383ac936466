"""Tables, findings and the HTML page of a profile; terminal and page show the same tables."""

import json
from typing import TYPE_CHECKING

from inferry.report import html
from inferry.report.formatting import count, seconds, share, tick
from inferry.report.html import Table
from inferry.report.svg import Series, lines, stacked

if TYPE_CHECKING:
    from inferry.engine.profiling.result import Point, Profile

_CLASSES = {
    "matmul": "matrix products",
    "attention": "attention",
    "elementwise": "norms and elementwise",
    "sampling": "sampling",
    "copies": "copies",
    "idle": "idle and launch gaps",
}
_TIMES = ("measured", "least for bytes (memory)", "least for operations (compute)")
_SHARES = ("of a copy's bandwidth", "of a product's operations")


def step_table(profile: "Profile", phase: str) -> Table:
    """A row per batch size: time, work, and shares of what the device achieves."""
    rows = [
        [
            count(point.batch),
            count(point.tokens),
            seconds(point.step_s),
            count(point.tokens_per_s),
            f"{point.moved_bytes / 1e9:,.3f}",
            f"{point.flops / 1e9:,.2f}",
            f"{point.moved_bytes / point.step_s / 1e9:,.1f}",
            share(point.bandwidth_share),
            f"{point.flops / point.step_s / 1e12:,.3f}",
            share(point.compute_share),
            point.bound,
        ]
        for point in profile.phase(phase)
    ]
    headings = ("batch", "tokens", "step", "tokens/s", "GB", "GFLOP", "GB/s", "of peak", "TFLOP/s", "of peak", "bound")
    return Table(headings, rows)


def class_table(profile: "Profile", phase: str) -> Table:
    """A row per batch size: the part of a step that each class of kernels takes."""
    rows = [
        [count(point.batch), *(share(point.seconds_by_class[kind] / point.step_s) for kind in _CLASSES)]
        for point in profile.phase(phase)
    ]
    return Table(("batch", *_CLASSES.values()), rows)


def about(profile: "Profile") -> list[str]:
    shape, settings = profile.dimensions, profile.settings
    weights = "random weights" if profile.is_random else "its weights"
    threads = f", threads: {settings['threads']}" if profile.device == "cpu" else ""
    return [
        f"{profile.model} in {profile.dtype} ({profile.weight_bytes / 1e9:,.2f} GB, {shape['layers']} layers of "
        f"{shape['hidden']:,}, {weights}) on {profile.device_name}{threads}.",
        f"The device copies {profile.peak.bytes_per_s / 1e9:,.1f} GB/s and multiplies matrices at "
        f"{profile.peak.flops_per_s / 1e12:,.2f} TFLOP/s.",
        f"Decodes see {settings['context_tokens']:,} tokens; prompts have {settings['prompt_tokens']:,} tokens, "
        f"at most {settings['chunk_tokens']:,} in a step.",
    ]


def findings(profile: "Profile") -> list[str]:
    """The transition from memory- to compute-bound, as sentences."""
    largest = max(point.batch for point in profile.phase("decode"))
    by_work, products, measured = (
        profile.roofline_transition,
        profile.product_transition,
        profile.measured_product_transition,
    )
    said = [
        "By roofline a decode step is memory-bound at every batch size: keys and values take longer to read than to "
        "multiply."
        if by_work is None
        else f"By roofline a decode step becomes compute-bound at batch size {by_work:,}.",
        f"By roofline products with weights alone become compute-bound at batch size {products:,}.",
        f"Measured, products with weights are memory-bound: their time does not grow with the batch up to {largest:,}."
        if measured is None
        else f"Measured, the time of products with weights grows with the batch from batch size {measured:,} on.",
    ]
    waiting = [point.batch for point in profile.phase("decode") if point.bound == "overhead"]
    if waiting:
        said.append(f"Decode steps up to batch size {max(waiting):,} mostly wait for the host.")
    if any(point.bandwidth_share > 1 for point in profile.points):
        said.append("Above 100 % of the copy's bandwidth, data is read from a cache of the device.")
    return said


def html_page(profile: "Profile") -> str:
    settings = json.dumps({**profile.settings, "versions": profile.versions}, indent=1, ensure_ascii=False)
    return html.page(
        f"Profile of {profile.model} on {profile.device_name}",
        (
            html.paragraph(" ".join((*about(profile), f"{profile.at}."))),
            html.section("Findings", " ".join(findings(profile))),
            *_phase(profile, "decode", "Decode", "One token of each sequence per step, by batch size."),
            *_phase(profile, "prefill", "Prefill", "Prompts of one step, by their number, until a chunk is full."),
            html.details("Settings", f"{profile.command}\n{settings}"),
        ),
    )


def _phase(profile: "Profile", phase: str, heading: str, text: str) -> list[str]:
    points = profile.phase(phase)
    groups = [count(point.batch) for point in points]
    times = lines(f"seconds of a {phase} step", groups, _times(points), tick, is_log=True)
    rates = lines("tokens per second", groups, _rates(points), lambda value: f"{value:,.4g}")
    shares = lines("share of what the device achieves", groups, _shares(points), "{:.0%}".format)
    kinds = stacked("seconds of a step by kind of kernel", groups, _kinds(points), tick)
    return [
        html.section(
            heading,
            f"{text} Where the measured time meets the larger of both least times, the device is fully used.",
            [
                html.with_legend(times, _TIMES),
                html.with_legend(kinds, _CLASSES.values()),
                html.with_legend(shares, _SHARES),
                rates,
            ],
        ),
        html.table(step_table(profile, phase)),
        html.table(class_table(profile, phase)),
    ]


def _times(points: "list[Point]") -> list[Series]:
    columns = zip(*((point.step_s, point.memory_s, point.compute_s) for point in points), strict=True)
    return [Series(name, n, _points(values)) for n, (name, values) in enumerate(zip(_TIMES, columns, strict=True))]


def _rates(points: "list[Point]") -> list[Series]:
    return [Series("tokens/s", 0, _points([point.tokens_per_s for point in points]))]


def _shares(points: "list[Point]") -> list[Series]:
    columns = zip(*((point.bandwidth_share, point.compute_share) for point in points), strict=True)
    return [Series(name, n, _points(values)) for n, (name, values) in enumerate(zip(_SHARES, columns, strict=True))]


def _kinds(points: "list[Point]") -> list[Series]:
    return [
        Series(name, n, _points([point.seconds_by_class[kind] for point in points]))
        for n, (kind, name) in enumerate(_CLASSES.items())
    ]


def _points(values: "list[float] | tuple[float, ...]") -> list[tuple[float, float]]:
    return [(float(index), value) for index, value in enumerate(values)]
