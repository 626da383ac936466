"""Images, audio, video and files in chat messages: what a model must support for them, and how large they are."""

from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET

from inferry.ingress.openai.request_schema import MediaPart, MessageSchema

_FEATURES: Final = {
    "image_url": "images",
    "image_embeds": "images",
    "input_image": "images",
    "input_audio": "audio_input",
    "audio_url": "audio_input",
    "audio_embeds": "audio_input",
    "video_url": "video",
    "input_video": "video",
    "file": "files",
    "input_file": "files",
}
"""The feature that each type of part needs. Parts of other types are text, or are left to the engine."""
_LIST: Final = 0x5B
_decoder: Final = msgspec.json.Decoder(list[MediaPart])


class Media(NamedTuple):
    """The media of one request: how many, their bytes in the body, and (feature, parameter) for each."""

    items: int
    size: int
    features: list[tuple[str, str]]


NO_MEDIA: Final = Media(0, 0, [])


def media_of(messages: list[MessageSchema]) -> Media:
    """The media in the messages. Of a message whose content is text only the first byte is read."""
    size = 0
    features: list[tuple[str, str]] = []
    for number, message in enumerate(messages):
        if memoryview(message.content)[0] != _LIST:
            continue
        try:
            parts = _decoder.decode(message.content)
        except msgspec.ValidationError:
            continue  # no list of parts; the engine, or the chat template, refuses it
        for index, part in enumerate(parts):
            feature = _FEATURES.get(part.type)
            if feature is not None:
                features.append((feature, f"messages[{number}].content[{index}].{part.type}"))
                size += sum([len(raw) for raw in part.contents() if raw is not UNSET])
    return Media(len(features), size, features) if features else NO_MEDIA
