"""LoRA adapters in the layout of the CPU's decoder, and which rows of a step use them."""

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from pathlib import Path

import torch
from torch import Tensor

from inferry.engine.adapter_weights import PROJECTIONS, LowRank, module_shapes, read_adapter
from inferry.engine.config import EngineConfig
from inferry.engine.loader import LayerNorms, load_norms, paired
from inferry.engine.lora import AdapterLayer, AdapterMatrices, AdapterRows
from inferry.engine.model import ModelConfig
from inferry.engine.planner import Work


class CpuAdapters:
    """The loaded adapters by number. The weights of norms are multiplied into them, as into the model's matrices."""

    def __init__(self, model_dir: Path, model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> None:
        self._model = model
        self._max_rank = config.max_adapter_rank
        self._dtype = dtype
        self._norms = load_norms(model_dir, model)
        self._loaded: dict[int, tuple[AdapterLayer, ...]] = {}

    def load(self, adapter: int, directory: Path) -> None:
        """Raises UnsupportedAdapter."""
        layers = read_adapter(directory, self._model, self._max_rank)
        self._loaded[adapter] = tuple(
            {name: self._joined(name, modules, norms) for name, parts in PROJECTIONS.items() if modules.keys() & parts}
            for modules, norms in zip(layers, self._norms, strict=True)
        )

    def unload(self, adapter: int) -> None:
        del self._loaded[adapter]

    def groups(self, pieces: Ordered[Work]) -> list[AdapterRows]:
        """The rows of each adapter in a step with these pieces, in the order of its rows."""
        if not any(piece.sequence.adapter for piece in pieces):
            return []
        rows: dict[int, list[int]] = {}
        at = 0
        for piece in pieces:
            rows.setdefault(piece.sequence.adapter, []).extend(range(at, at + piece.tokens))
            at += piece.tokens
        return [
            AdapterRows(None if len(rows) == 1 else torch.tensor(own_rows), self._loaded[adapter])
            for adapter, own_rows in sorted(rows.items())
            if adapter
        ]

    def _joined(self, name: str, modules: Mapping[str, LowRank], norms: LayerNorms) -> AdapterMatrices:
        """The modules of one matrix side by side: each has its own ranks and its own outputs."""
        norm = {"qkv": norms.input, "gate_up": norms.post_attention}.get(name)
        downs: list[Tensor] = []
        ups: list[Tensor] = []
        for module in PROJECTIONS[name]:
            _, outputs = module_shapes(self._model)[module]
            pair = modules.get(module)
            if pair is None:
                ups.append(torch.empty(0, outputs))
                continue
            downs.append((pair.a if norm is None else pair.a * norm).t())
            ups.append(self._arranged(module, pair.b).t())
        up = torch.block_diag(*ups)  # type: ignore[no-untyped-call]
        return AdapterMatrices(torch.cat(downs, 1).to(self._dtype).contiguous(), up.to(self._dtype).contiguous())

    def _arranged(self, module: str, outputs: Tensor) -> Tensor:
        """Outputs in the order of the decoder's: pairs of RoPE adjacent, queries scaled."""
        if module not in ("q", "k"):
            return outputs
        scale = self._model.query_scale if module == "q" and not self._model.has_qk_norm else 1.0
        return paired(outputs, self._model.head_dim) * scale
