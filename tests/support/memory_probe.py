"""Runs an engine at its limits in this process and prints its memory: `python -m support.memory_probe DIR OPTIONS`.

OPTIONS is an EngineConfig as JSON. One sequence fills the context, and beside it as many as run at once fill the KV
cache. Tokens are drawn with top_p. So every part of the estimate is really used.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from inferry.domain.sampling import Sampling
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.loader import load_model
from inferry.engine.messages import Request
from inferry.engine.model import Decoder
from inferry.engine.runner import TorchRunner


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a value of dataclasses and sequences; memory that two share counts once."""
    storages: dict[int, int] = {}
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, torch.Tensor):
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, list | tuple):
            todo += one
        elif hasattr(one, "__dataclass_fields__"):
            todo += vars(one).values()
    return sum(storages.values())


def warm_up() -> None:
    """Use what the engine uses of torch: the pages of its libraries belong to the runtime."""
    one = torch.ones(1, 2, 256, 64)
    torch.mm(one[0, 0], one[0, 1].t())
    torch.bmm(one[0], one[0].transpose(1, 2)).softmax(-1).sort(-1)
    torch.nn.functional.scaled_dot_product_attention(one, one, one, is_causal=True)


def main() -> None:
    torch.set_num_threads(1)
    directory, config = Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=EngineConfig)
    warm_up()
    found = {"runtime": status_bytes("VmRSS")}
    model, weights = load_model(directory, context_tokens=config.context_tokens)
    found |= {"weights": tensor_bytes(weights), "load_peak": status_bytes("VmHWM"), "loaded": status_bytes("VmRSS")}
    decoder = Decoder(model, weights, blocks=config.cache_blocks, block_tokens=config.block_tokens)
    found["kv_cache"] = tensor_bytes(decoder._cache)
    for layer in decoder._cache:
        layer.fill_(0.0)  # every page; sequences leave a few blocks unused
    core = EngineCore(TorchRunner(decoder, config.block_tokens, pads=config.pads), config)
    others = config.max_sequences - 1
    share = (config.blocks - core.pool.blocks_for(core.context_tokens)) // others * config.block_tokens
    # The first sequence decodes until the last one has been computed.
    tokens = core.kv_tokens // config.chunk_tokens + 4
    for key, length in enumerate([core.context_tokens - tokens] + [share - config.block_tokens - tokens] * others):
        prompt = [(key * 7 + at) % model.vocab_size for at in range(length)]
        request = Request(key, prompt, Sampling(temperature=1.0, top_p=0.9, max_tokens=tokens, ignore_eos=True), 0)
        assert core.add(request) is None
    most = 0
    while core.has_work:
        most = max(most, len(core.step().tokens))
    assert most == config.max_sequences
    found["peak"] = status_bytes("VmHWM")
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
