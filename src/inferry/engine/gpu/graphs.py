"""Passes of a decoder, captured in CUDA graphs by size. Launching kernels one by one costs more than a small step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from inferry.engine.gpu.adapter_tiles import max_tiles
from inferry.engine.gpu.buckets import bucket_for, decode_buckets, row_buckets
from inferry.engine.gpu.decoder import GpuDecoder, PassShape
from inferry.engine.gpu.metadata import Packed

MAX_GRAPH_ROWS = 2048
"""Larger steps are launched kernel by kernel: the host is faster than the device there, and no row is padding."""


class Passes:
    """Runs the passes of a step. `memory_bytes`: what the captured graphs hold on the device.

    Without `capture`, or where no graph is large enough, kernels are launched for the exact size.
    """

    def __init__(self, decoder: GpuDecoder) -> None:
        self._decoder = decoder
        capacity = decoder.capacity
        self._decode_sizes = decode_buckets(min(capacity.pieces, capacity.rows))
        self._row_sizes = row_buckets(min(capacity.rows, MAX_GRAPH_ROWS))
        self._bodies: dict[PassShape, torch.cuda.CUDAGraph] = {}
        self._tails: dict[int, torch.cuda.CUDAGraph] = {}
        self.memory_bytes = 0

    def capture(self) -> None:
        """Capture all sizes, the largest first: smaller ones then share its memory."""
        free, _ = torch.cuda.mem_get_info()
        pool = torch.cuda.graph_pool_handle()
        decoder = self._decoder
        shapes = [
            shape
            for uses_adapters in ((False, True) if decoder.capacity.adapters else (False,))
            for shape in (
                *(self._mixed(rows, uses_adapters) for rows in self._row_sizes),
                *(self._decodes(size, uses_adapters) for size in self._decode_sizes),
            )
        ]
        for shape in reversed(shapes):
            self._bodies[shape] = _captured(partial(decoder.body, shape), pool)
        for rows in reversed(self._decode_sizes):
            self._tails[rows] = _captured(partial(decoder.tail, rows), pool)
        torch.cuda.synchronize()
        self.memory_bytes = free - torch.cuda.mem_get_info()[0]

    def body(self, packed: Packed) -> None:
        shape = self.shape_for(packed)
        graph = None if shape is None else self._bodies.get(shape)
        if graph is None:
            self._decoder.body(PassShape(packed.rows, packed.decodes, packed.tiles, packed.adapter_tiles))
        else:
            graph.replay()

    def tail(self, rows: int) -> None:
        size = bucket_for(self._decode_sizes, rows)
        graph = None if size is None else self._tails.get(size)
        if graph is None:
            self._decoder.tail(rows)
        else:
            graph.replay()

    def shape_for(self, packed: Packed) -> PassShape | None:
        """The smallest captured shape that holds the step. Without adapters it is the one that does not compute any."""
        uses_adapters = packed.adapter_tiles > 0
        if not packed.tiles:
            size = bucket_for(self._decode_sizes, packed.decodes)
            return None if size is None else self._decodes(size, uses_adapters)
        rows = bucket_for(self._row_sizes, packed.rows)
        return None if rows is None else self._mixed(rows, uses_adapters)

    def _mixed(self, rows: int, uses_adapters: bool) -> PassShape:
        capacity = self._decoder.capacity
        adapter_tiles = max_tiles(rows, capacity.adapters, has_chunks=True) if uses_adapters else 0
        return PassShape(rows, min(capacity.pieces, rows), capacity.tiles(rows), adapter_tiles)

    def _decodes(self, size: int, uses_adapters: bool) -> PassShape:
        adapters = self._decoder.capacity.adapters
        return PassShape(size, size, 0, max_tiles(size, adapters, has_chunks=False) if uses_adapters else 0)


def _captured(launch: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    # Once before: the first launch of a kernel compiles it and libraries allocate, which a capture does not allow.
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        launch()
    return graph
