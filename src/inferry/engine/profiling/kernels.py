"""Classes of kernels and operators by their names, for the time of a step by what it is spent on."""

from collections.abc import Iterable, Mapping

CLASSES = ("matmul", "attention", "elementwise", "sampling", "copies", "idle")
"""`elementwise` includes norms, rotations and embeddings; `idle` is time without a kernel: launch gaps and the host."""

_NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("aten::bmm", "attention", "_attend", "_combine", "flash_", "fmha")),
    ("sampling", ("argmax", "aten::sort", "aten::topk", "multinomial", "_thresholds", "searchsorted", "aten::rand")),
    ("matmul", ("aten::mm", "aten::addmm", "gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk", "xmma")),
    (
        "copies",
        ("memcpy", "memset", "copy", "aten::index", "aten::cat", "aten::clone", "aten::gather", "aten::scatter"),
    ),
)


def kernel_class(name: str) -> str:
    """The class of a CUDA kernel, a Triton kernel of the engine, or an operator of torch."""
    lower = name.lower()
    return next((kind for kind, parts in _NAMES if any(part in lower for part in parts)), "elementwise")


def seconds_by_class(kernels: Iterable[tuple[str, float]], step_s: float) -> dict[str, float]:
    """Seconds of a step by class, from (name, seconds) of its kernels. They sum to `step_s`.

    A profiler slows small operators down: if kernels take longer than the step without it, they are scaled down.
    """
    spent = dict.fromkeys(CLASSES, 0.0)
    for name, seconds in kernels:
        spent[kernel_class(name)] += seconds
    busy_s = sum(spent.values())
    scale = min(1.0, step_s / busy_s) if busy_s else 1.0
    return {kind: seconds * scale for kind, seconds in spent.items()} | {"idle": max(0.0, step_s - busy_s)}


def idle_share(seconds: Mapping[str, float]) -> float:
    total = sum(seconds.values())
    return seconds["idle"] / total if total else 0.0
