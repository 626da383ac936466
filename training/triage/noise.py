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


def add_typos(random: Random, text: str) -> str:
    """One or two words are misspelt, shortened or missing."""
    words = text.split(" ")
    possible = [place for place, word in enumerate(words) if _may_change(word)]
    for place in sorted(random.sample(possible, min(random.choice((1, 2)), len(possible))), reverse=True):
        word = words[place]
        bare = _bare(word)
        if bare in _SHORT and random.random() < 0.5:
            words[place] = word.replace(bare, _SHORT[bare])
        elif random.random() < 0.9 or len(words) < 4:
            words[place] = word.replace(bare, _misspelt(random, bare))
        else:
            del words[place]
    return " ".join(words)


def _bare(word: str) -> str:
    return word.strip(".,!?\n")


def _may_change(word: str) -> bool:
    bare = _bare(word)
    return len(bare) > 2 and "\n" not in word and bare.replace("'", "").isalpha()


def replace_words(random: Random, text: str, synonyms: dict[str, list[str]]) -> str:
    """Some words are replaced by others of the same meaning."""
    rate = random.choice((0.15, 0.3, 0.6))
    words: list[str] = []
    for word in text.split(" "):
        bare = _bare(word)
        others = synonyms.get(bare)
        if others is None or random.random() >= rate:
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
