"""The step's metadata and the KV cache on the device."""

from typing import NamedTuple

import torch
from torch import Tensor

from inferry.engine.gpu.metadata import Capacity, section_lengths


class StepTensors(NamedTuple):
    """The sections of `metadata.Sections` on the device, at fixed addresses."""

    counts: Tensor
    starts: Tensor
    computed: Tensor
    table_starts: Tensor
    last_rows: Tensor
    tile_pieces: Tensor
    tile_firsts: Tensor
    codes: Tensor
    row_pieces: Tensor
    adapter_rows: Tensor
    adapter_slots: Tensor
    adapter_starts: Tensor
    adapter_counts: Tensor
    tables: Tensor


def step_tensors(capacity: Capacity, array: Tensor) -> StepTensors:
    """Views of `array`, laid out like `metadata.host_sections`."""
    return StepTensors(*torch.split(array, list(section_lengths(capacity).values())))


class LayerCache(NamedTuple):
    """Keys and values of one layer, each [blocks, kv heads, block tokens, head dim]."""

    keys: Tensor
    values: Tensor
