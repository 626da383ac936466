"""Support tickets of a known intent, and replies to them."""

import re
from dataclasses import dataclass
from functools import cache
from random import Random

from training.triage.augment import degraded
from training.triage.grammar import INTENTS, Filling, Frame, Split, frames, lines, part, sections
from training.triage.noise import add_typos, replace_words

_QUESTION = re.compile(
    r"(?:can|could|would|will|may|do|does|did|is|are|was|were|has|have you|how|where|when|why|what|which|who|any)\b",
    re.IGNORECASE,
)
# Of the tickets that have more than their main sentences (three of four), how many start with an aside.
_ABOUT_ANOTHER_INTENT = 0.06
_NEUTRAL = 0.1
_TYPOS = 0.15
_DEGRADED = 0.45


@dataclass(frozen=True)
class Ticket:
    """`frames`: the sources of the frames that its sentences were made of."""

    intent: str
    text: str
    frames: tuple[str, ...]


def make_ticket(random: Random, intent: str, split: Split) -> Ticket:
    filling = Filling(random, split)
    if split == "train" and random.random() < _DEGRADED:
        text = degraded(random, _same_intent(random, filling, intent))
    else:
        text = _joined(random, _body(random, filling, intent, split))
    if random.random() < 0.1:
        subject = filling.expand(random.choice(frames(intent, split)))
        text = f"Subject: {subject}\n{text}"
    if random.random() < 0.25:
        text = text.lower()
    if split == "train" and random.random() < 0.4:
        text = replace_words(random, text, _synonyms())
    if random.random() < _TYPOS:
        text = add_typos(random, text)
    return Ticket(intent, text, tuple(frame.source for frame in filling.used))


def _body(random: Random, filling: Filling, intent: str, split: Split) -> list[str]:
    main = frames(intent, split)
    count = random.choices((1, 2, 3), (65, 28, 7))[0]
    sentences = [filling.expand(frame) for frame in random.sample(main, min(count, len(main)))]
    if split == "train" and random.random() < 0.3:
        sentences[random.randrange(len(sentences))] = _about(random, "about", intent)
    if random.random() < 0.25:
        return sentences
    aside = _aside(random, filling, intent, split)
    if aside:
        sentences[0] = f"{aside}{random.choice((', but ', '. ', ' but ', '. However, '))}{sentences[0]}"
    contexts = frames("context", split)
    for _ in range(random.choices((0, 1, 2), (45, 40, 15))[0]):
        sentences.insert(random.randrange(len(sentences) + 1), filling.expand(random.choice(contexts)))
    if random.random() < 0.4:
        sentences.insert(0, filling.expand(random.choice(frames("greeting", split))))
    if random.random() < 0.4:
        sentences.append(filling.expand(random.choice(frames("closing", split))))
    return sentences


def _same_intent(random: Random, filling: Filling, intent: str) -> list[str]:
    """Sentences of the intent, and sometimes one that belongs to none."""
    chosen = random.sample(frames(intent, "train"), random.choice((1, 2, 2, 3)))
    sentences = [filling.expand(frame) for frame in chosen]
    if random.random() < 0.3:
        sentences.append(_about(random, "about", intent))
    if random.random() < 0.2:
        sentences.append(filling.expand(random.choice(frames("context", "train"))))
    return sentences


def _aside(random: Random, filling: Filling, intent: str, split: Split) -> str:
    """What the ticket is not about: rarely the topic of another department."""
    kind = random.random()
    if kind >= _ABOUT_ANOTHER_INTENT + _NEUTRAL:
        return ""
    if kind >= _ABOUT_ANOTHER_INTENT:
        return filling.expand(random.choice(_asides("neutral", intent, split)))
    if split == "train" and random.random() < 0.6:
        return _about(random, "negated", random.choice([other for other in INTENTS if other != intent]))
    return filling.expand(random.choice(_asides("another intent", intent, split)))


def _about(random: Random, section: str, intent: str) -> str:
    """A sentence about what the intent is about. It shows training more words, not more sentences."""
    filling = Filling(random, "train")
    filling.values["keyword"] = random.choice(_keywords(intent))
    return filling.expand(random.choice(_carriers(section)))


@cache
def _keywords(intent: str) -> list[str]:
    return "; ".join(sections("lexicon.txt")[intent]).split("; ")


@cache
def _carriers(section: str) -> tuple[Frame, ...]:
    return tuple(Frame.parse(line) for line in sections("lexicon.txt")[section])


@cache
def _synonyms() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in lines("synonyms.txt"):
        group = line.split("; ")
        for word in group:
            found.setdefault(word, []).extend(other for other in group if other != word)
    return found


@cache
def _asides(section: str, intent: str, split: Split) -> tuple[Frame, ...]:
    listed = part(sections("aside.txt")[section], split)
    if split == "train":
        listed += sections("more.txt").get(section, [])
    tagged = (line.split(": ", 1) for line in listed)
    return tuple(Frame.parse(source) for tags, source in tagged if intent not in tags.split())


def _joined(random: Random, sentences: list[str]) -> str:
    separator = random.choices((" ", "\n", ", ", " "), (70, 12, 8, 10))[0]
    is_careful = random.random() < 0.7
    texts: list[str] = []
    for sentence in sentences:
        text = sentence.strip()
        if is_careful:
            text = text[0].upper() + text[1:]
        if text[-1].isalnum() and separator != ", ":
            is_question = _QUESTION.match(text) is not None and random.random() < 0.85
            text += "?" if is_question else random.choices((".", "!", "..", ""), (80, 8, 4, 8))[0]
        texts.append(text)
    return separator.join(texts)


@cache
def _reply_frames(section: str) -> tuple[Frame, ...]:
    """Replies are what the model writes, so none of them is held out."""
    return tuple(Frame.parse(line) for line in sections("reply_parts.txt")[section])


def make_reply(random: Random, intent: str) -> str:
    """A short reply, mostly with an opening and a closing."""
    filling = Filling(random, "train")
    chosen = [random.choice(_reply_frames(intent))]
    if random.random() < 0.7:
        chosen.insert(0, random.choice(_reply_frames("opening")))
    if random.random() < 0.6:
        chosen.append(random.choice(_reply_frames("closing")))
    return " ".join(filling.expand(frame) for frame in chosen)


def fits_intent(reply: str, intent: str) -> bool:
    """Whether the reply has one of the replies to tickets of this intent."""
    return any(text in reply for frame in _reply_frames(intent) for text in frame.expansions())
