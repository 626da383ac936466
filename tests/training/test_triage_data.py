"""The generated texts: what is held out is absent from training, and one seed gives the same texts."""

import json
import re
from collections.abc import Iterator
from random import Random

import pytest

from training.triage.augment import degraded
from training.triage.documents import RULES, instruction, make_document, make_task
from training.triage.grammar import (
    INTENTS,
    TEXTS,
    TRAINING_ONLY,
    UNSCRIPTED,
    Filling,
    Frame,
    frames,
    lines,
    part,
    sections,
    withheld_words,
    words,
)
from training.triage.tickets import fits_intent, make_reply


def frame_lists() -> Iterator[list[str]]:
    for path in sorted(TEXTS.glob("*.txt")):
        if path.name not in ("vocabulary.txt", "reply_parts.txt", "lexicon.txt", "synonyms.txt", *TRAINING_ONLY):
            yield from sections(path.name).values() if "\n= " in path.read_text() else [lines(path.name)]


def test_no_frame_is_both_in_training_and_held_out() -> None:
    for listed in frame_lists():
        assert not set(part(listed, "train")) & {*part(listed, "dev"), *part(listed, "held")}
        assert not set(part(listed, "dev")) & set(part(listed, "held"))
    for intent in INTENTS:
        train, dev, held = (set(frames(intent, split)) for split in ("train", "dev", "held"))
        assert not train & (dev | held)
        assert not dev & held
        assert len(train) >= 250
        assert len(held) >= 20
        others = {line for other in INTENTS if other != intent for line in lines(f"{other}.txt")}
        assert not set(lines(f"{intent}.txt")) & others


def test_no_training_only_frame_is_a_near_copy_of_a_held_out_one() -> None:
    random = Random(14)

    def samples(frame: Frame) -> set[frozenset[str]]:
        texts = (Filling(random, "train").expand(frame).lower() for _ in range(12))
        return {frozenset(re.findall(r"[a-z']+", text)) for text in texts}

    more = sections("more.txt")
    for intent in INTENTS:
        held = [words for frame in frames(intent, "held") for words in samples(frame) if len(words) > 2]
        for line in more[intent]:
            for said in samples(Frame.parse(line)):
                assert max(len(said & other) / len(said | other) for other in held) < 0.9, line


def test_no_word_of_the_held_out_vocabulary_is_in_training() -> None:
    held = withheld_words()
    assert len(held) > 80
    assert not set(held) & {word for entries in words("train").values() for word in entries}
    pattern = re.compile(r"(?<!\w)(?:" + "|".join(map(re.escape, held)) + r")(?!\w)", re.IGNORECASE)
    random = Random(3)
    for _ in range(4_000):
        for text in make_document(random).texts:
            assert not pattern.search(text), text


def test_words_that_carry_an_intent_are_in_training() -> None:
    ordinary = {"bill", "invoice", "membership", "driver", "parcel", "password", "refund", "subscription", "receipt"}
    random = Random(11)
    said: set[str] = set()
    for _ in range(4_000):
        said.update(re.findall(r"[a-z]+", " ".join(make_document(random).texts).lower()))
    assert ordinary <= said


def test_no_held_out_instruction_is_in_training() -> None:
    listed = sections("instructions.txt")
    for section in ("classify", "classify system", "reply", "check", "check system", "general system"):
        withheld = {*part(listed[section], "dev"), *part(listed[section], "held")} - set(part(listed[section], "train"))
        random = Random(12)
        assert withheld
        assert not withheld & {instruction(random, section, "train") for _ in range(5_000)}


def test_a_degraded_text_has_words_of_its_sentences_only() -> None:
    random = Random(13)
    sentences = ["my parcel never came to the house", "where is the parcel that I ordered"]
    texts = {degraded(random, sentences) for _ in range(500)}
    assert len(texts) > 300
    assert {word for text in texts for word in text.split()} == set(" ".join(sentences).split())


def test_held_out_texts_use_held_out_vocabulary_only() -> None:
    held = words("held")
    random = Random(4)
    for _ in range(1_000):
        filling = Filling(random, "held")
        for name, entries in held.items():
            assert filling.value(name).endswith(tuple(entries)), name


def test_one_seed_gives_the_same_documents() -> None:
    first, again = ([make_document(random) for _ in range(200)] for random in (Random(5), Random(5)))
    assert first == again
    assert first[0] != make_document(Random(6))


def test_every_intent_and_every_rule_occurs_in_both_parts() -> None:
    for split in ("train", "held"):
        random = Random(6)
        answers = {make_task(random, "classify", split).messages[-1].content for _ in range(600)}
        assert set(INTENTS) <= answers
        checks = {make_task(random, "check", split).messages[-1].content for _ in range(600)}
        assert checks == {"ok", *(f"violates: {rule}" for rule in RULES)}


def test_a_frame_chooses_alternatives_and_keeps_a_slot_within_a_text() -> None:
    filling = Filling(Random(1), "train")
    texts = {filling.expand(Frame.parse("[a|b [c|d]|]{city}")) for _ in range(100)}
    city = filling.value("city")
    assert texts == {f"a{city}", f"b c{city}", f"b d{city}", city}
    with pytest.raises(ValueError, match="unbalanced"):
        Frame.parse("a|b")


def test_a_reply_fits_its_intent_and_no_other() -> None:
    random = Random(8)
    for _ in range(1_000):
        intent = random.choice(INTENTS)
        reply = make_reply(random, intent)
        assert [other for other in INTENTS if fits_intent(reply, other)] == [intent]
    assert not any("{" in line for line in lines("reply_parts.txt"))


def test_unscripted_tickets_share_no_long_phrase_with_generated_ones() -> None:
    def phrases(text: str) -> set[tuple[str, ...]]:
        said = re.findall(r"[\w']+", text.lower())
        return {tuple(said[at : at + 7]) for at in range(len(said) - 6)}

    unscripted = [json.loads(line) for path in UNSCRIPTED for line in path.read_text().splitlines()]
    assert len(unscripted) == 40
    assert {ticket["intent"] for ticket in unscripted} == set(INTENTS)
    known = set.union(*(phrases(ticket["ticket"]) for ticket in unscripted))
    random = Random(9)
    for _ in range(5_000):
        for text in make_document(random).texts:
            assert not phrases(text) & known, text
