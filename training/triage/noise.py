"""Typing errors and short forms."""

from random import Random

_ONSETS = (*"bcdfghklmnprstvwz", "br", "cl", "dr", "fl", "gr", "kl", "pl", "st", "tr")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SHORT = {
    "please": "pls",
    "you": "u",
    "your": "ur",
    "because": "cause",
    "are": "r",
    "thanks": "thx",
    "password": "pw",
    "account": "acc",
    "cannot": "cant",
    "can't": "cant",
    "don't": "dont",
    "I'm": "im",
    "doesn't": "doesnt",
    "and": "&",
    "with": "w/",
    "message": "msg",
    "tomorrow": "tmrw",
    "for": "4",
    "really": "rly",
    "something": "sth",
    "delivery": "dlvry",
    "subscription": "sub",
    "picture": "pic",
    "information": "info",
}


def add_typos(random: Random, text: str, protected: frozenset[str]) -> str:
    """Some words are misspelt, shortened, unknown or missing; those that a reply may copy are kept."""
    rate = random.choice((0.03, 0.06, 0.12))
    words: list[str] = []
    for word in text.split(" "):
        bare = word.strip(".,!?\n")
        if random.random() >= rate or bare in protected or "\n" in word or any(letter.isdigit() for letter in word):
            words.append(word)
        elif bare in _SHORT and random.random() < 0.5:
            words.append(word.replace(bare, _SHORT[bare]))
        elif (kind := random.random()) < 0.6:
            words.append(_misspelt(random, word))
        elif kind < 0.8:
            words.append(invented_word(random))
    return " ".join(words)


def replace_words(random: Random, text: str, synonyms: dict[str, list[str]], protected: frozenset[str]) -> str:
    """Some words are replaced by others of the same meaning."""
    rate = random.choice((0.15, 0.3, 0.6))
    words: list[str] = []
    for word in text.split(" "):
        bare = word.strip(".,!?\n")
        others = synonyms.get(bare)
        if others is None or bare in protected or random.random() >= rate:
            words.append(word)
        else:
            words.append(word.replace(bare, random.choice(others)))
    return " ".join(words)


def invented_word(random: Random) -> str:
    syllables = (random.choice(_ONSETS) + random.choice("aeiou") for _ in range(random.choice((2, 2, 3))))
    return "".join(syllables) + (random.choice("nrlsxtk") if random.random() < 0.5 else "")


def _misspelt(random: Random, word: str) -> str:
    if len(word) < 3:
        return word
    place = random.randrange(len(word) - 1)
    match random.randrange(4):
        case 0:
            return word[:place] + word[place + 1] + word[place] + word[place + 2 :]
        case 1:
            return word[:place] + word[place + 1 :]
        case 2:
            return word[:place] + word[place] + word[place:]
    return word[:place] + random.choice(_LETTERS) + word[place + 1 :]
