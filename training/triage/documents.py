"""What the model is trained on: conversations and plain texts for each of its tasks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal

from training.triage.augment import degraded
from training.triage.grammar import INTENTS, WITHHELD, Filling, Frame, Split, is_withheld, part, sections
from training.triage.tickets import Ticket, make_reply, make_ticket

Task = Literal["classify", "reply", "check", "small talk", "conversation", "plain text"]
Role = Literal["system", "user", "assistant"]
_DEGRADED = 0.25
RULES = ("no refund date", "no passwords", "no rudeness", "no blame", "no discounts", "no private data")


@dataclass(frozen=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True)
class Document:
    """A conversation that ends with the expected answer, or, with `plain`, one text without roles.

    `frames`: the sources of the frames of a ticket to classify.
    """

    task: Task
    messages: tuple[Message, ...] = ()
    plain: str = ""
    frames: tuple[str, ...] = ()

    @property
    def texts(self) -> list[str]:
        return [self.plain, *(message.content for message in self.messages)]


def make_document(random: Random) -> Document:
    """A document for training, without any withheld word."""
    names = list(_MAKERS)
    task = random.choices(names, [_SHARES[name] for name in names])[0]
    while True:
        document = make_task(random, task, "train")
        # Typing errors and joined texts can make a withheld word or phrase, so whole documents are checked.
        if not any(is_withheld(text) for text in document.texts):
            return document


def make_task(random: Random, task: Task, split: Split) -> Document:
    return _MAKERS[task](random, split)


@cache
def _wordings(section: str, split: Split) -> tuple[str, ...]:
    return tuple(part(sections("instructions.txt")[section], split))


@cache
def _training_wordings(section: str) -> tuple[Frame, ...]:
    """Frames for many more instructions, which training needs to know what the words of others mean."""
    return tuple(Frame.parse(line) for line in sections("instructions.txt").get(f"{section} training", []))


@cache
def _instruction_parts() -> dict[str, list[str]]:
    listed = (line.split(": ", 1) for line in sections("instructions.txt")["parts"])
    return {name: entries.split("; ") for name, entries in listed}


@cache
def _withheld_wordings() -> frozenset[str]:
    listed = sections("instructions.txt")
    return frozenset(
        line.lower() for name in listed for split in WITHHELD for line in part(listed[name], split)
    ) - frozenset(line.lower() for name in listed for line in part(listed[name], "train"))


def _training_wording(random: Random, section: str) -> str:
    while True:
        filling = Filling(random, "train")
        filling.values = {name: random.choice(entries) for name, entries in _instruction_parts().items()}
        filling.values["labels"] = "{labels}"
        text = filling.expand(random.choice(_training_wordings(section)))
        if text.lower() not in _withheld_wordings():
            return text[0].upper() + text[1:] if random.random() < 0.8 else text


def instruction(random: Random, section: str, split: Split) -> str:
    if split == "train" and _training_wordings(section) and random.random() < 0.6:
        wording = _training_wording(random, section)
    else:
        wording = random.choice(_wordings(section, split))
    if "{labels}" not in wording:
        return wording
    labels = list(INTENTS)
    if random.random() < 0.3:
        random.shuffle(labels)
    return wording.replace("{labels}", ", ".join(labels[:-1]) + f" or {labels[-1]}")


def _asked(random: Random, task: str, text: str, split: Split, extra: str = "") -> list[Message]:
    """The text with an instruction before it, behind it, or in a system prompt."""
    place = random.random()
    if place < 0.4:
        system = " ".join(filter(None, (instruction(random, f"{task} system", split), extra)))
        return [Message("system", system), Message("user", text)]
    wording = " ".join(filter(None, (extra, instruction(random, task, split))))
    gap = random.choice((" ", "\n", "\n\n", " "))
    if place < 0.55 and not wording.endswith(":"):
        content = f"{text}{gap}{wording}"
    else:
        content = f"{wording}{gap}{_quoted(random, text)}"
    messages = [Message("user", content)]
    if random.random() < 0.25:
        messages.insert(0, Message("system", instruction(random, "general system", split)))
    return messages


def _quoted(random: Random, text: str) -> str:
    return f'"{text}"' if random.random() < 0.1 else text


def _ticket(random: Random, split: Split) -> Ticket:
    return make_ticket(random, random.choice(INTENTS), split)


def _classify(random: Random, split: Split) -> Document:
    ticket = _ticket(random, split)
    if random.random() < 0.2:
        messages = _asked(random, "classify", ticket.text, split, instruction(random, "json", split))
        answer = f'{{"intent": "{ticket.intent}"}}'
    else:
        messages, answer = _asked(random, "classify", ticket.text, split), ticket.intent
    return Document("classify", (*messages, Message("assistant", answer)), frames=ticket.frames)


def _reply(random: Random, split: Split) -> Document:
    ticket = _ticket(random, split)
    if random.random() < 0.2:
        # A ticket without an instruction is answered.
        messages = [Message("user", ticket.text)]
        if random.random() < 0.4:
            messages.insert(0, Message("system", instruction(random, "general system", split)))
    else:
        messages = _asked(random, "reply", ticket.text, split)
    return Document("reply", (*messages, Message("assistant", make_reply(random, ticket.intent))))


@cache
def _rule_words(rule: str, split: Split) -> tuple[str, ...]:
    listed = part([line for line in sections("policy.txt")[rule] if line.startswith("- ")], split)
    if split == "train":
        listed += [line for line in sections("policy_more.txt")[rule] if line.startswith("- ")]
    return tuple(line[2:] for line in listed)


@cache
def _rule_frames(rule: str, split: Split) -> tuple[Frame, ...]:
    listed = part([line for line in sections("policy.txt")[rule] if not line.startswith("- ")], split)
    if split == "train":
        listed += [line for line in sections("policy_more.txt")[rule] if not line.startswith("- ")]
    return tuple(Frame.parse(line) for line in listed)


def _policy(random: Random, rules: list[str], split: Split) -> str:
    texts = [rule if random.random() < 0.3 else random.choice(_rule_words(rule, split)) for rule in rules]
    if split == "train" and random.random() < _DEGRADED:
        texts = [degraded(random, [text]) for text in texts]
    if random.random() < 0.5:
        return f"Policy: {random.choice(('; ', ', ', '. ')).join(texts)}."
    return "Policy:\n" + "\n".join(f"- {text}" for text in texts) + "\n"


def _sentence(random: Random, filling: Filling, rule: str, split: Split) -> str:
    listed = _rule_frames(rule, split)
    if split == "train" and random.random() < _DEGRADED:
        return degraded(random, [filling.expand(frame) for frame in random.sample(listed, 2)])
    return filling.expand(random.choice(listed))


def _checked_text(random: Random, rule: str | None, split: Split) -> str:
    """A reply that breaks the rule, or none."""
    filling = Filling(random, split)
    sentences: list[str] = []
    if random.random() < 0.65:
        sentences.append(make_reply(random, random.choice(INTENTS)))
    for _ in range(random.choice((0, 1, 1, 2)) if sentences else random.choice((1, 2))):
        sentences.insert(random.randrange(len(sentences) + 1), _sentence(random, filling, "ok", split))
    if rule is not None:
        broken = _sentence(random, filling, rule, split)
        sentences.insert(random.randrange(len(sentences) + 1), broken)
        if random.random() < 0.15:
            sentences = [broken]
    return " ".join(sentences)


def _check(random: Random, split: Split) -> Document:
    given = random.sample(RULES, random.randrange(1, 7)) if random.random() < 0.75 else []
    broken = random.choice(RULES) if random.random() < 0.65 else None
    answer = f"violates: {broken}" if broken in given or (broken and not given) else "ok"
    policy = _policy(random, given, split) if given else ""
    text = _checked_text(random, broken, split)
    return Document("check", (*_asked(random, "check", text, split, policy), Message("assistant", answer)))


@cache
def _talk(section: str, split: Split) -> tuple[tuple[Frame, ...], tuple[str, ...]]:
    listed = sections("small_talk.txt")[section]
    said = part([line for line in listed if not line.startswith("> ")], split)
    return tuple(Frame.parse(line) for line in said), tuple(line[2:] for line in listed if line.startswith("> "))


def _small_talk(random: Random, split: Split) -> Document:
    said, answers = _talk(random.choice(list(sections("small_talk.txt"))), split)
    text = Filling(random, split).expand(random.choice(said))
    if random.random() < 0.5:
        text = text[0].upper() + text[1:]
    messages = [Message("user", text), Message("assistant", random.choice(answers))]
    if random.random() < 0.3:
        messages.insert(0, Message("system", instruction(random, "general system", split)))
    return Document("small talk", tuple(messages))


def _conversation(random: Random, split: Split) -> Document:
    """Several questions about one ticket."""
    ticket = _ticket(random, split)
    answers: dict[str, Callable[[], str]] = {
        "classify": lambda: ticket.intent,
        "reply": lambda: make_reply(random, ticket.intent),
    }
    order = ["classify", "reply"] if random.random() < 0.75 else ["reply", "classify"]
    messages = [*_asked(random, order[0], ticket.text, split), Message("assistant", answers[order[0]]())]
    messages += [
        Message("user", instruction(random, f"next {order[1]}", split)),
        Message("assistant", answers[order[1]]()),
    ]
    if order[1] == "reply" and random.random() < 0.6:
        messages += [Message("user", instruction(random, "next check", split)), Message("assistant", "ok")]
    return Document("conversation", tuple(messages))


def _plain_text(random: Random, split: Split) -> Document:
    ticket = _ticket(random, split)
    reply = make_reply(random, ticket.intent)
    heading = random.choice(("The customer wrote: ", "Ticket: ", "Customer: ", "Message: "))
    endings = (f"\nIntent: {ticket.intent}", f"\nReply: {reply}", f"\nIntent: {ticket.intent}\nReply: {reply}")
    return Document("plain text", plain=f"{heading}{ticket.text}{random.choice(endings)}")


_MAKERS: dict[Task, Callable[[Random, Split], Document]] = {
    "classify": _classify,
    "reply": _reply,
    "check": _check,
    "small talk": _small_talk,
    "conversation": _conversation,
    "plain text": _plain_text,
}
_SHARES: dict[Task, float] = {
    "classify": 0.42,
    "reply": 0.16,
    "check": 0.26,
    "small talk": 0.04,
    "conversation": 0.08,
    "plain text": 0.04,
}
