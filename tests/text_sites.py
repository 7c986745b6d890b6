"""Three sites with texts and three ways to read them: an encoder of word pieces, an LSTM over words, a site's own model
over bytes. A larger model of the server learns from all."""

import csv
import pathlib
import random

import tomli_w

from encoders import write_encoder

GOOD, BAD = ("good", "fine", "great", "lovely"), ("bad", "dull", "poor", "awful")
THINGS = ("film", "day", "plot", "song", "book")
OWN = """
import torch
from solera.data.encodings import BYTES
from torch import nn


class Spelled(nn.Module):
    encoding = BYTES

    def __init__(self, shape, vocabulary, classes):
        super().__init__()
        self.letters, self.out = nn.EmbeddingBag(vocabulary, 8), nn.Linear(8, classes)

    def forward(self, ids):
        return self.out(self.letters(ids))


def west():
    texts = [f"{word} {thing}" for word in ("good", "bad", "fine", "poor") for thing in ("film", "day", "song")]
    return texts, [i // 3 % 2 for i in range(12)]
"""


def sentences(count: int, seed: int) -> list[tuple[str, str]]:
    """(text, class) pairs: good words or bad ones about some thing."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        words = GOOD if i % 2 else BAD
        said = [f"{rng.choice(words)} {rng.choice(THINGS)}" for _ in range(rng.randint(1, 4))]
        found.append((" and ".join(said), "good" if i % 2 else "bad"))
    return found


def write_texts(file: pathlib.Path, count: int, seed: int, header: tuple[str, str] = ("text", "label")) -> str:
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([header, *sentences(count, seed)])
    return str(file)


def text_sites(home: pathlib.Path, method: dict, rounds: int = 2, where: str = "everywhere") -> dict:
    """The tables of a federation whose files are in `home`."""
    write_encoder(home / "encoder")
    (home / "own.py").write_text(OWN)
    options = {"lstm": {"hidden": 8, "embedding": 8}}
    large = {"server": "transformer", "options": options | {"transformer": {"width": 16, "layers": 1}}}
    return {
        "run": {"seed": 5, "rounds": rounds},
        "data": {
            "name": "texts",
            "path": write_texts(home / "server.csv", 40, 1),
            "classes": ["good", "bad"],  # not in the order of their names
            "length": 24,
            "test_size": 20,
            "client_test": 0.2,
        },
        "public": {
            "source": "dataset",
            "name": "texts",
            "path": write_texts(home / "public.csv", 24, 2),
            "where": where,
        },
        "models": large if method["name"] in ("fedet", "fusionlarge", "fedgems", "dsfl") else {"options": options},
        "sites": {
            "east": {
                "data": write_texts(home / "east.csv", 20, 3, ("review", "mood")),
                "columns": ["review"],
                "label_column": "mood",
                "model": "hf:./encoder",
            },
            "north": {"data": write_texts(home / "north.csv", 16, 4), "model": "lstm"},
            "west": {"data": "own.py:west", "model": "own.py:Spelled"},
        },
        "engine": {"name": "inprocess"},
        "method": method,
    }


def write_tables(file: pathlib.Path, tables: dict) -> pathlib.Path:
    file.write_text(tomli_w.dumps(tables))
    return file
