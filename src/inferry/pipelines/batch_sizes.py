"""How the items of a stage are divided between calls. Pure: what is queued is an argument."""

MAX_INPUTS = 2048
"""Inputs of one call of `/v1/embeddings`."""
FULL_QUEUE = 256
"""Queued jobs that fill the next batches of a GPU worker."""
MIN_WINDOW = 8


def batch_sizes(items: int, queued: int, workers: int) -> list[int]:
    """Inputs of each call of an embed stage. `queued` are jobs that wait for a worker of its model.

    While there are any, one call has all inputs: every call costs the gateway the same whatever its size, and the
    workers are busy anyway. While none is, each worker gets its part at once.
    """
    calls = max(1, min(items, workers if queued == 0 else 1), -(-items // MAX_INPUTS))
    return [(items + index) // calls for index in range(calls)]


class MapLoad:
    """What the maps of all runs have in flight in one lane: `maps` that run, and `jobs` that their elements may queue.

    Belongs to the event loop. A map counts an element when it starts it: its job is in no queue yet.
    """

    def __init__(self) -> None:
        self.maps = 0
        self.jobs = 0


def may_start(in_flight: int, width: int, load: MapLoad, queued: int, queue_limit: int) -> bool:
    """Whether a map with this many elements in flight may start one more, which may queue `width` jobs.

    One element may always run, so every map makes progress. Beyond it all maps of a lane together keep `FULL_QUEUE`
    jobs queued, since further jobs would not be computed sooner, or `MIN_WINDOW` elements each. None is started while
    the queue is half full, or while the jobs of maps would fill half of it, whether they are queued yet or not.
    """
    if in_flight == 0:
        return True
    if max(queued + 1, load.jobs + width) > queue_limit // 2:
        return False
    return in_flight < max(MIN_WINDOW, (FULL_QUEUE - queued) // max(1, load.maps))
