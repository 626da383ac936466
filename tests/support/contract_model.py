"""The model that laws are tested on: the random one, taught to write characters that take several tokens each.

After one of `CHAIN`'s tokens it writes the next of them, for ever; after anything else it is the random model, whose
next token hangs on all that came before.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from support.random_model import ensure_random_model

if TYPE_CHECKING:
    from torch import Tensor

SPOKEN = "\U0001f642é日жא"
"""Characters of two to four bytes, no byte twice: a token for every byte, and one that follows each."""

_CERTAIN = 0.2
_LOUD = 50.0


def ensure_contract_model(directory: Path) -> Path:
    ensure_random_model(directory)
    marker = directory / "speaks-bytes"
    if marker.exists():
        return directory
    path = directory / "model.safetensors"
    weights = load_file(str(path))
    chain = chain_ids(directory)
    make_certain(weights, list(zip(chain, [*chain[1:], chain[0]], strict=True)))
    save_file(weights, str(path), metadata={"format": "pt"})
    marker.touch()
    return directory


def make_certain(weights: "dict[str, Tensor]", pairs: Sequence[tuple[int, int]]) -> None:
    """After the first token of a pair the model writes the second."""
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    for here, following in pairs:
        head[following] = embedding[here] * _CERTAIN
    for here, _ in pairs:
        # So loud that what the layers add to it changes nothing.
        embedding[here] *= _LOUD


def chain_ids(directory: Path) -> list[int]:
    """The tokens of `SPOKEN`, one for each of its bytes."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    names = _names_of_bytes()
    found = [tokenizer.token_to_id(names[byte]) for byte in SPOKEN.encode()]
    ids = [token for token in found if token is not None]
    assert len(ids) == len(found)
    assert len(set(ids)) == len(ids)
    return ids


def _names_of_bytes() -> dict[int, str]:
    """How byte-level tokenizers spell bytes: printable ones as themselves, the others by characters set aside."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    names = {byte: chr(byte) for byte in plain}
    others = (byte for byte in range(256) if byte not in names)
    return names | {byte: chr(256 + number) for number, byte in enumerate(others)}
