"""Sizes that passes are captured for. A step runs in the smallest that holds it; the rest is padding."""

from bisect import bisect_left


def decode_buckets(pieces: int) -> list[int]:
    """Numbers of single-token pieces: powers of two up to 8, then every 8, and from 128 every 16."""
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, pieces + 16, 16)]
    return _up_to(sizes, pieces)


def row_buckets(rows: int) -> list[int]:
    """Rows of a step with prompt chunks: padding is less than a fifth beyond 256 rows."""
    sizes = [16, *range(32, 256, 32), *range(256, 512, 64), *range(512, 1024, 128), *range(1024, rows + 256, 256)]
    return _up_to(sizes, rows)


def bucket_for(sizes: list[int], wanted: int) -> int | None:
    """The smallest size that holds `wanted`; None where none does."""
    at = bisect_left(sizes, wanted)
    return sizes[at] if at < len(sizes) else None


def _up_to(sizes: list[int], limit: int) -> list[int]:
    return [*(size for size in sizes if size < limit), limit]
