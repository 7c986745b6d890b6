"""Made-up texts on four topics by several authors: small enough for language models on a laptop, and of no real person.

Each sentence follows a pattern whose words belong to the topic. Every choice is a hash of the row's number and of what
is chosen, so the texts are the same on every machine and with every version of Python.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from .readers import Split

TOPICS = ("weather", "kitchen", "harbour", "garden")
AUTHORS = 24
WORDS = {
    "weather": {
        "who": ("the wind", "a cold rain", "the morning fog", "a thin cloud", "the first snow", "the storm"),
        "does": ("crossed", "covered", "followed", "left", "hid"),
        "what": ("the valley", "the old road", "the grey hills", "the quiet town", "the northern plain"),
        "how": ("before noon", "all night", "without a sound", "for three days", "in the evening"),
    },
    "kitchen": {
        "who": ("the baker", "my aunt", "the young cook", "the waiter", "our neighbour", "the kitchen boy"),
        "does": ("peeled", "salted", "tasted", "burned", "served"),
        "what": ("the red onions", "a bowl of soup", "the warm bread", "two ripe pears", "the black beans"),
        "how": ("with great care", "far too late", "before the guests came", "in a copper pan", "once again"),
    },
    "harbour": {
        "who": ("the pilot", "an old sailor", "the harbour master", "the crew", "a fishing boat", "the ferry"),
        "does": ("reached", "watched", "circled", "missed", "entered"),
        "what": ("the outer pier", "the narrow bay", "the lighthouse", "a rusty buoy", "the deep channel"),
        "how": ("at high tide", "under full sail", "against the current", "with one engine", "at first light"),
    },
    "garden": {
        "who": ("the gardener", "a small hedgehog", "the blackbird", "the widow", "her youngest son", "the bees"),
        "does": ("found", "guarded", "trimmed", "visited", "watered"),
        "what": ("the wild roses", "the apple tree", "a bed of tulips", "the stone wall", "the herb corner"),
        "how": ("in early spring", "near the gate", "after the rain", "in the deep shade", "every sunday"),
    },
}
PATTERNS = ("{who} {does} {what} {how}.", "{how}, {who} {does} {what}.", "{who} {does} {what}.")
LINKS = ("then", "and so", "later", "but soon", "meanwhile")


def toy_texts(rows: tuple[int, int], classes: int) -> dict[str, Split]:
    """Training and test texts of one to three sentences, with their topics and, for training, their authors."""
    return {split: _texts(split, n, classes) for split, n in zip(("train", "test"), rows, strict=True)}


def _texts(split: str, n: int, classes: int) -> Split:
    labels = np.arange(n) % classes
    texts = [_text(f"{split} {i}", TOPICS[k]) for i, k in enumerate(labels)]
    authors = np.asarray([f"author-{_number(f'{split} {i} author', AUTHORS):02d}" for i in range(n)])
    return Split(labels, lambda wanted: [texts[i] for i in wanted], authors, TOPICS[:classes])


def _text(key: str, topic: str) -> str:
    said = [_sentence(f"{key} {s}", topic) for s in range(1 + _number(f"{key} sentences", 3))]
    linked = [said[0], *(f"{_one_of(LINKS, f'{key} link {s}')} {sentence}" for s, sentence in enumerate(said[1:]))]
    return " ".join(linked)


def _sentence(key: str, topic: str) -> str:
    words = {slot: _one_of(choices, f"{key} {slot}") for slot, choices in WORDS[topic].items()}
    return _one_of(PATTERNS, f"{key} pattern").format(**words)


def _one_of(choices: Sequence[str], key: str) -> str:
    return choices[_number(key, len(choices))]


def _number(key: str, below: int) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % below
