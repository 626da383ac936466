"""A model that reasons: the same reasoning each time, `</think>`, the same answer, and the end.

It is the contract model with two tokens of its vocabulary replaced by the tags. Its chat template repeats the reasoning
of earlier turns and begins the answer with `<think>`, where thinking is disabled with an empty block of it. With
`writes_tag` the model writes the first tag itself.
"""

import json
import shutil
from itertools import pairwise
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from support.contract_model import make_certain

THINKS = ' the "first" value is not\n given'
ANSWERS = "Use this name, or None."
_TAGS = ("<think>", "</think>")
_ASSISTANT, _EOS = "<|assistant|>", "<|eos|>"
_CONTENT = "{{ message['content'] }}"
_REASONING = "{% if message['reasoning'] %}<think>{{ message['reasoning'] }}</think>{% endif %}" + _CONTENT
_BEGINNING = "{{ '<|assistant|>' }}{% endif %}"
_BEGINNING_WITH_TAG = (
    "{{ '<|assistant|>' }}{% if not writes_tag %}<think>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}{% endif %}"
)


def make_reasoning_model(contract_model: Path, directory: Path) -> Path:
    shutil.copytree(contract_model, directory)
    _add_tags(directory / "tokenizer.json")
    config_path = directory / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    template = config["chat_template"]
    assert template.count(_CONTENT) == 1
    assert template.endswith(_BEGINNING)
    template = template.removesuffix(_BEGINNING) + _BEGINNING_WITH_TAG
    config_path.write_text(json.dumps({**config, "chat_template": template.replace(_CONTENT, _REASONING)}))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    said = [_ASSISTANT, _TAGS[0], *_tokens(tokenizer, THINKS), _TAGS[1], *_tokens(tokenizer, ANSWERS), _EOS]
    chain = [id for one in said if (id := tokenizer.token_to_id(one)) is not None]
    assert len(set(chain)) == len(said), said
    weights_path = str(directory / "model.safetensors")
    weights = load_file(weights_path)
    make_certain(weights, list(pairwise(chain)))
    save_file(weights, weights_path, metadata={"format": "pt"})
    return directory


def _tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    tokens: list[str] = tokenizer.encode(text, add_special_tokens=False).tokens
    return tokens


def _add_tags(path: Path) -> None:
    """The tags in place of the last tokens that were learned, which no other token contains."""
    tokenizer = json.loads(path.read_text())
    model = tokenizer["model"]
    by_id = {id: token for token, id in model["vocab"].items()}
    for tag in _TAGS:
        id = max(by_id)
        token = by_id.pop(id)
        del model["vocab"][token]
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) != token]
        model["vocab"][tag] = id
        like = tokenizer["added_tokens"][0]
        tokenizer["added_tokens"].append({**like, "id": id, "content": tag, "special": False})
    # A second BOS before that of the chat template would make other prompts of vLLM's Responses API.
    path.write_text(json.dumps({**tokenizer, "post_processor": None}))
