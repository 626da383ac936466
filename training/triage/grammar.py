"""Text from frames: `[a|b|]` chooses an alternative, `{name}` takes a word of the vocabulary.

Frames and vocabulary are split into a part for training and a held-out part that training never sees.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal

from training.triage.noise import invented_word

Split = Literal["train", "held"]
TEXTS = Path(__file__).parent / "texts"
INTENTS = (
    "billing",
    "refund",
    "delivery",
    "login",
    "bug",
    "feature",
    "cancellation",
    "security",
    "praise",
    "other",
)
_HELD_EVERY, _HELD_PLACE = 6, 1
_PIECES = re.compile(r"[\[\]|]|\{\w+\}|[^\[\]|{}]+|[{}]")


@dataclass(frozen=True)
class Slot:
    name: str


@dataclass(frozen=True)
class Choice:
    options: "tuple[Sequence, ...]"


Sequence = tuple[str | Slot | Choice, ...]


@dataclass(frozen=True)
class Frame:
    """One sentence with alternatives and slots."""

    source: str
    parts: Sequence
    slots: frozenset[str]

    @staticmethod
    def parse(source: str) -> "Frame":
        pieces = _PIECES.findall(source)
        options, rest = _options(pieces, 0)
        if len(options) != 1 or rest != len(pieces):
            raise ValueError(f"unbalanced frame: {source}")
        return Frame(source, options[0], frozenset(re.findall(r"\{(\w+)\}", source)))


def _options(pieces: list[str], start: int) -> tuple[tuple[Sequence, ...], int]:
    """The alternatives from `start` to the closing bracket or the end, and the place behind them."""
    options: list[Sequence] = []
    parts: list[str | Slot | Choice] = []
    place = start
    while place < len(pieces) and pieces[place] != "]":
        piece = pieces[place]
        if piece == "[":
            inner, place = _options(pieces, place + 1)
            parts.append(Choice(inner))
        elif piece == "|":
            options.append(tuple(parts))
            parts = []
        elif piece.startswith("{") and piece.endswith("}") and len(piece) > 2:
            parts.append(Slot(piece[1:-1]))
        else:
            parts.append(piece)
        place += 1
    return (*options, tuple(parts)), place


def lines(name: str) -> list[str]:
    """The lines of a text file without comments."""
    text = (TEXTS / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def sections(name: str) -> dict[str, list[str]]:
    """The lines of a text file by the heading (`= name`) above them."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in lines(name):
        if line.startswith("= "):
            heading = line[2:]
            found[heading] = []
        else:
            found[heading].append(line)
    return found


def part(entries: list[str], split: Split) -> list[str]:
    """Every sixth entry is held out. Training drops entries that contain a word of the held-out vocabulary."""
    held = [index % _HELD_EVERY == _HELD_PLACE for index in range(len(entries))]
    if split == "held":
        return [entry for entry, is_held in zip(entries, held, strict=True) if is_held]
    return [entry for entry, is_held in zip(entries, held, strict=True) if not is_held and not has_held_out_word(entry)]


@cache
def frames(name: str, split: Split) -> tuple[Frame, ...]:
    return tuple(Frame.parse(line) for line in part(lines(name), split))


@cache
def _all_words() -> dict[str, list[str]]:
    listed = (line.split(": ", 1) for line in lines("vocabulary.txt"))
    return {name: entries.split("; ") for name, entries in listed}


@cache
def words(split: Split) -> dict[str, list[str]]:
    """The vocabulary: entries by the name of their slot."""
    return {name: part(entries, split) for name, entries in _all_words().items()}


@cache
def held_out_words() -> tuple[str, ...]:
    return tuple(word for entries in _all_words().values() for word in part(entries, "held"))


def has_held_out_word(text: str) -> bool:
    lowered = text.lower()
    found = [word for word in _lowered_held_words() if word in lowered]
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", lowered) for word in found)


@cache
def _lowered_held_words() -> tuple[str, ...]:
    return tuple(word.lower() for word in held_out_words())


class Filling:
    """The values of slots within one text: a name has the same value everywhere in it."""

    def __init__(self, random: Random, split: Split) -> None:
        self._random = random
        self._words = words(split)
        self.values: dict[str, str] = {}

    def value(self, name: str) -> str:
        if name not in self.values:
            self.values[name] = self._draw(name)
        return self.values[name]

    def expand(self, frame: Frame) -> str:
        return "".join(self._texts(frame.parts))

    def _texts(self, parts: Sequence) -> list[str]:
        texts: list[str] = []
        for piece in parts:
            if isinstance(piece, str):
                texts.append(piece)
            elif isinstance(piece, Slot):
                texts.append(self.value(piece.name))
            else:
                options = piece.options
                texts += self._texts(options[int(self._random.random() * len(options))])
        return texts

    def _draw(self, name: str) -> str:
        random = self._random
        if name in self._words:
            entries = self._words[name]
            word = entries[int(random.random() * len(entries))]
            # An invented name: copying it into a reply cannot be learned by heart.
            return (
                f"{invented_word(random).capitalize()} {word}" if name == "product" and random.random() < 0.3 else word
            )
        return _generated(name, random)


def _generated(name: str, random: Random) -> str:
    number = random.randrange
    match name:
        case "order":
            kind = random.choice(("order {}", "order #{}", "order no. {}", "order number {}", "Order {}"))
            return kind.format(_order_number(random))
        case "amount" | "amount2":
            value = f"{number(1, 900)}.{number(100):02d}" if random.random() < 0.6 else str(number(2, 900))
            return random.choice(("{}", "${}", "{} euros", "{} dollars", "£{}", "{} EUR", "€{}")).format(value)
        case "date":
            month = random.choice(("January", "March", "April", "May", "July", "August", "October", "November"))
            return random.choice((f"{month} {number(1, 29)}", f"{number(1, 29)} {month}", f"the {number(4, 29)}th"))
        case "days":
            return str(number(2, 15))
        case "percent":
            return str(number(1, 11) * 5)
        case "version":
            return f"{number(1, 12)}.{number(20)}" + (f".{number(10)}" if random.random() < 0.5 else "")
        case "phone":
            return f"0{number(100, 999)} {number(100_000, 9_999_999)}"
        case "house" | "number" | "number2":
            return str(number(1, 200))
    raise KeyError(name)


def _order_number(random: Random) -> str:
    digits = "".join(random.choices("0123456789", k=random.randrange(4, 9)))
    shape = random.random()
    if shape < 0.5:
        return digits
    letters = "".join(random.choices("ABCDEFGHKLMNPQRSTUVWXYZ", k=random.choice((1, 2))))
    return f"{letters}-{digits}" if shape < 0.8 else f"{letters}{digits}"
