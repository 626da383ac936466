"""What LoRA adapters add to the matrices of a layer, grouped by adapter: one small product for each in the step."""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdapterMatrices:
    """`down` [in, ranks] and `up` [ranks, out] of one matrix of a layer, in the layout of `engine.model`."""

    down: Tensor
    up: Tensor


AdapterLayer = dict[str, AdapterMatrices]
"""The changed matrices of a layer by their names in `LayerWeights`."""


@dataclass(frozen=True)
class AdapterRows:
    """The rows of a step that use one adapter. `rows` of None are all."""

    rows: Tensor | None
    layers: tuple[AdapterLayer, ...]


def add_adapters(groups: Ordered[AdapterRows], layer: int, matrix: str, inputs: Tensor, out: Tensor) -> None:
    """Add to each row of `out` what its adapter makes of the same row of `inputs`."""
    for group in groups:
        matrices = group.layers[layer].get(matrix)
        if matrices is None:
            continue
        if group.rows is None:
            out.addmm_(torch.mm(inputs, matrices.down), matrices.up)
        else:
            narrow = torch.mm(inputs.index_select(0, group.rows), matrices.down)
            out.index_add_(0, group.rows, torch.mm(narrow, matrices.up))
