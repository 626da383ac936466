"""Text from frames: `[a|b|]` chooses an alternative, `{name}` takes a word of the vocabulary.

Frames and vocabulary are split into three parts: training, development (its errors may be inspected), and held out
(its texts are never read). `TRAINING_ONLY` files add frames to training; none of them is a near copy of a frame of the
other two parts. Training sees no frame of those parts, and none of their entries for slots that say nothing about the
intent, such as products and places. Words that carry an intent are never withheld: a model
trained from scratch cannot know a word that it has not seen.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal

from training.triage.noise import invented_word

Split = Literal["train", "dev", "held"]
TEXTS = Path(__file__).parent / "texts"
UNSCRIPTED = (Path(__file__).parent / "unscripted.jsonl", Path(__file__).parent / "unscripted_by_author.jsonl")
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
_EVERY = 6
_INTENT_EVERY = 12
_PLACES: dict[int, Split] = {1: "dev", 2: "held"}
WITHHELD: tuple[Split, ...] = ("dev", "held")
TRAINING_ONLY = ("more.txt", "policy_more.txt")
# Slots whose entries say nothing about the intent.
_SPLIT_SLOTS = frozenset({"product", "page", "device", "feature", "city", "person", "occasion", "country"})
_INVENTED = 0.12
_LONGEST_SHARED_PHRASE = 6
_WORDS = re.compile(r"[\w']+")
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

    @staticmethod
    def parse(source: str) -> "Frame":
        pieces = _PIECES.findall(source)
        options, rest = _options(pieces, 0)
        if len(options) != 1 or rest != len(pieces):
            raise ValueError(f"unbalanced frame: {source}")
        return Frame(source, options[0])

    def expansions(self) -> list[str]:
        """Every text of a frame without slots."""
        return _expansions(self.parts)


def _expansions(parts: Sequence) -> list[str]:
    texts = [""]
    for piece in parts:
        match piece:
            case str():
                endings = [piece]
            case Choice():
                endings = [text for option in piece.options for text in _expansions(option)]
            case Slot():
                raise ValueError(f"slot {piece.name}")
        texts = [text + ending for text in texts for ending in endings]
    return texts


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


def part(entries: list[str], split: Split, every: int = _EVERY) -> list[str]:
    """Of `every` entries, one is for development, one is held out, and the others are for training."""
    return [entry for index, entry in enumerate(entries) if _PLACES.get(index % every, "train") == split]


@cache
def frames(name: str, split: Split) -> tuple[Frame, ...]:
    """Sentences of an intent or of a part of a ticket. An intent has about 300, so one of twelve is held out."""
    listed = part(lines(f"{name}.txt"), split, _INTENT_EVERY if name in INTENTS else _EVERY)
    if split == "train":
        listed += sections("more.txt")[name]
    return tuple(Frame.parse(line) for line in listed)


@cache
def _all_words() -> dict[str, list[str]]:
    listed = (line.split(": ", 1) for line in lines("vocabulary.txt"))
    return {name: entries.split("; ") for name, entries in listed}


@cache
def words(split: Split) -> dict[str, list[str]]:
    """The vocabulary: entries by the name of their slot."""
    return {
        name: _split_entries(name)[split] if name in _SPLIT_SLOTS else entries for name, entries in _all_words().items()
    }


@cache
def _split_entries(name: str) -> dict[Split, list[str]]:
    """Entries of a slot by split. One is withheld only if it has a word that no training text needs."""
    ordinary = _ordinary_words()
    found: dict[Split, list[str]] = {"train": [], "dev": [], "held": []}
    for index, entry in enumerate(_all_words()[name]):
        is_ordinary = ordinary.issuperset(_WORDS.findall(entry.lower()))
        found["train" if is_ordinary else _PLACES.get(index % _EVERY, "train")].append(entry)
    return found


@cache
def _ordinary_words() -> frozenset[str]:
    """Words of the split frames, of slots that are not split, and of the training entries of the others."""
    unsplit = ("vocabulary.txt", *TRAINING_ONLY)
    texts = [path.read_text(encoding="utf-8") for path in TEXTS.glob("*.txt") if path.name not in unsplit]
    for name, entries in _all_words().items():
        texts += part(entries, "train") if name in _SPLIT_SLOTS else entries
    return frozenset(word for text in texts for word in _WORDS.findall(text.lower()))


@cache
def withheld_words() -> tuple[str, ...]:
    """The vocabulary of development and of the held-out part."""
    return tuple(word for name in sorted(_SPLIT_SLOTS) for split in WITHHELD for word in _split_entries(name)[split])


def is_withheld(text: str) -> bool:
    """Whether the text has a withheld word, or seven consecutive words of an unscripted ticket."""
    said = _WORDS.findall(text.lower())
    phrases = _withheld_phrases()
    for place, word in enumerate(said):
        for phrase in phrases.get(word, ()):
            if said[place : place + len(phrase)] == phrase:
                return True
    return False


@cache
def _withheld_phrases() -> dict[str, list[list[str]]]:
    """Phrases by their first word."""
    found = [_WORDS.findall(word.lower()) for word in withheld_words()]
    for path in UNSCRIPTED:
        for line in path.read_text(encoding="utf-8").splitlines():
            said = _WORDS.findall(json.loads(line)["ticket"].lower())
            length = _LONGEST_SHARED_PHRASE + 1
            found += [said[place : place + length] for place in range(len(said) - length + 1)]
    by_first: dict[str, list[list[str]]] = {}
    for phrase in found:
        by_first.setdefault(phrase[0], []).append(phrase)
    return by_first


class Filling:
    """The values of slots within one text: a name has the same value everywhere in it."""

    def __init__(self, random: Random, split: Split) -> None:
        self._random = random
        self._split = split
        self._words = words(split)
        self.values: dict[str, str] = {}
        self.used: list[Frame] = []

    def value(self, name: str) -> str:
        if name not in self.values:
            self.values[name] = self._draw(name)
        return self.values[name]

    def expand(self, frame: Frame) -> str:
        self.used.append(frame)
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
        if name not in self._words:
            return _generated(name, random)
        entries = self._words[name]
        word = entries[int(random.random() * len(entries))]
        # Invented names: the model meets words that it does not know, and learns that they say nothing.
        if name == "product" and random.random() < 0.3:
            return f"{invented_word(random).capitalize()} {word}"
        if self._split == "train" and name in _SPLIT_SLOTS and random.random() < _INVENTED:
            *start, last = word.split(" ")
            invented = invented_word(random)
            return " ".join([*start, invented.capitalize() if last[0].isupper() else invented])
        return word


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
