"""LoRA adapters on the device: matrices of all slots, allocated once, so that captured passes read them in place."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from inferry.engine.adapter_weights import PROJECTIONS, Adapter, LowRank, module_shapes, read_adapter
from inferry.engine.config import EngineConfig
from inferry.engine.gpu.adapter_tiles import tile_rows
from inferry.engine.gpu.kernels.lora import StackedAdapters, add_adapters, splits_of
from inferry.engine.gpu.tensors import StepTensors
from inferry.engine.memory import padded_rank
from inferry.engine.model import ModelConfig


class GpuAdapters:
    """The loaded adapters by number, each in a slot. Modules that an adapter does not change are zeros there."""

    def __init__(
        self, model: ModelConfig, config: EngineConfig, rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model = model
        self._max_rank = config.max_adapter_rank
        self._rank = padded_rank(config.max_adapter_rank)
        self._free = list(range(config.max_adapters))
        self.slots: dict[int, int] = {}
        shapes = module_shapes(model)

        def stack(modules: tuple[str, ...]) -> StackedAdapters:
            inputs, widths = shapes[modules[0]][0], tuple(shapes[module][1] for module in modules)
            a = torch.zeros(config.max_adapters, len(modules), self._rank, inputs, dtype=dtype, device=device)
            b = torch.zeros(config.max_adapters, sum(widths), self._rank, dtype=dtype, device=device)
            return StackedAdapters(a, b, widths)

        self._layers = [{name: stack(parts) for name, parts in PROJECTIONS.items()} for _ in range(model.layers)]
        largest = max(len(parts) * splits_of(shapes[parts[0]][0]) for parts in PROJECTIONS.values())
        self._narrow = torch.empty(rows * largest * self._rank, dtype=torch.float32, device=device)

    def load(self, adapter: int, directory: Path) -> None:
        """Raises UnsupportedAdapter."""
        self.put(adapter, read_adapter(directory, self._model, self._max_rank))

    def put(self, adapter: int, layers: Adapter) -> None:
        """Write the weights to a free slot. Steps in flight use other slots."""
        slot = self._free.pop(0)
        self.slots[adapter] = slot
        for stacks, modules in zip(self._layers, layers, strict=True):
            for name, stack in stacks.items():
                _write(stack, slot, PROJECTIONS[name], modules)

    def unload(self, adapter: int) -> None:
        self._free.append(self.slots.pop(adapter))

    def add(
        self, step: StepTensors, layer: int, matrix: str, inputs: Tensor, out: Tensor, tiles: int, has_chunks: bool
    ) -> None:
        """Add to the rows of `out` what their adapters make of `inputs`, in at most `tiles` tiles."""
        add_adapters(step, inputs, self._layers[layer][matrix], self._narrow, out, tiles, tile_rows(has_chunks))


def _write(stack: StackedAdapters, slot: int, parts: tuple[str, ...], modules: Mapping[str, LowRank]) -> None:
    a, b = (torch.zeros(one.shape[1:], dtype=torch.float32) for one in (stack.a, stack.b))
    first = 0
    for index, (part, width) in enumerate(zip(parts, stack.widths, strict=True)):
        pair = modules.get(part)
        if pair is not None:
            rank = len(pair.a)
            a[index, :rank] = pair.a
            b[first : first + width, :rank] = pair.b
        first += width
    stack.a[slot].copy_(a)
    stack.b[slot].copy_(b)
