"""How the items of a stage are divided between calls. Pure: what is queued is an argument."""

MAX_INPUTS = 2048
"""Inputs of one call of `/v1/embeddings`."""
FULL_QUEUE = 256
"""Queued jobs that fill the next batches of a GPU worker."""
MIN_WINDOW = 8


def batch_sizes(items: int, queued: int, workers: int) -> list[int]:
    """Inputs of each call of an embed stage.

    While calls are queued, one call has all inputs: every call costs the gateway the same whatever its size, and the
    workers are busy anyway. While none is, each worker gets its part at once.
    """
    calls = max(1, min(items, workers if queued == 0 else 1), -(-items // MAX_INPUTS))
    return [(items + index) // calls for index in range(calls)]


def map_window(items: int, queued: int, queue_limit: int) -> int:
    """Elements of a map that run at the same time: enough to keep `FULL_QUEUE` jobs queued in the lane.

    Further jobs in the queue would not be computed sooner. While the queue is longer, each map has `MIN_WINDOW`
    elements in flight, and one while the queue is half full, so that many maps do not fill it.
    """
    if queued >= queue_limit // 2:
        return 1
    return min(items, max(MIN_WINDOW, FULL_QUEUE - queued), max(1, queue_limit - queued))
