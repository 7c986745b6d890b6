"""What three decisions about texts are worth: a table of docs/performance.md.

    python benchmarks/language_speed.py                                     # about two minutes on one core
    python benchmarks/language_speed.py --record benchmarks/results/language-speed.json --write docs/performance.md

* Length buckets against padding every text to `data.length`: training and prediction of MiniLM's first two layers.
* Tokenising once, before the first round, against again in every round.
* LoRA (rank 8) against full fine-tuning: bytes of a model on the wire, seconds of a training.

The texts are those of toy-text, most of them short, read with `data.length` = 64. One thread. Both ways of a
comparison are timed in turn, and a ratio compares times of the same lap; the medians over the laps are reported. Needs
the extras `text` and `minilm`; nothing is downloaded.
"""

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from grid import put
from solera.core.tensors import copy_of
from solera.data import load
from solera.data.encodings import encoded
from solera.models import build, encoding_of
from solera.models.lora import Lora, adapted, sizes_of
from solera.models.zoo import texts
from solera.train.fitting import Local, fit, logits_of

LENGTH, TEXTS, STEPS, BATCH = 64, 96, 4, 16
LAPS = 5


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def in_turn(ways: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """The processor's seconds of every way, lap after lap; a first lap does not count."""
    laps = [{name: seconds(way) for name, way in ways.items()} for _ in range(LAPS + 1)][1:]
    return {name: [lap[name] for lap in laps] for name in ways}


def ratio(found: dict[str, list[float]], slow: str, fast: str) -> float:
    return statistics.median(s / f for s, f in zip(found[slow], found[fast], strict=True))


def padded(work: Callable[[], object]) -> Callable[[], object]:
    """The same work with all texts in one length."""

    def way() -> None:
        kept, texts.BUCKETS = texts.BUCKETS, ()
        try:
            work()
        finally:
            texts.BUCKETS = kept

    return way


def training(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> Callable[[], object]:
    local = Local(steps=STEPS, batch=BATCH, optimizer="adam", lr=1e-4)
    return lambda: fit(copy_of(model), ids, labels, local, 0)


def measure() -> dict[str, Any]:
    torch.set_num_threads(1)
    data = load("toy-text", train_size=TEXTS, test_size=8, length=LENGTH)
    assert data.texts is not None
    texts, labels, reader = list(data.texts.train), data.train.labels, encoding_of("minilm-l2")
    assert reader is not None
    (ids, _) = encoded(texts, [reader], LENGTH)
    tokens = (ids != reader.padding).sum(1)

    two = build("minilm-l2", 4, (LENGTH,))
    trained, asked = training(two, ids, labels), lambda: logits_of(two, ids)
    train = in_turn({"buckets": trained, "padding": padded(trained)})
    ask = in_turn({"buckets": asked, "padding": padded(asked)})

    one = build("minilm-l1", 4, (LENGTH,))
    epoch = Local(epochs=1, batch=BATCH, optimizer="adam", lr=1e-4)
    by_round = in_turn({
        "once": lambda: fit(copy_of(one), ids, labels, epoch, 0),
        "tokenising": lambda: encoded(texts, [reader], LENGTH),
    })  # fmt: skip

    found: dict[str, Any] = {
        "texts": {
            "count": TEXTS,
            "length": LENGTH,
            "tokens_median": int(tokens.median()),
            "tokens_most": int(tokens.max()),
        },
        "padding_over_buckets": {
            "training": ratio(train, "padding", "buckets"),
            "asking": ratio(ask, "padding", "buckets"),
        },
        "tokenising_each_round": {
            "of_a_local_epoch": ratio(by_round, "tokenising", "once"),
            "texts_per_second": TEXTS / statistics.median(by_round["tokenising"]),
        },
        "lora": {},
    }
    for name in ("minilm-l1", "minilm-l3", "minilm-l6"):
        full = build(name, 4, (LENGTH,), head="shared")
        small = adapted(copy_of(full), Lora(rank=8), name)
        times = in_turn({"full": training(full, ids, labels), "lora": training(small, ids, labels)})
        sent, whole = sizes_of(small)
        found["lora"][name] = {"bytes": sent, "bytes_full": whole, "full_over_lora": ratio(times, "full", "lora")}
    return found


def table(found: dict[str, Any]) -> str:
    """The results in Markdown."""
    texts, pad, tok = found["texts"], found["padding_over_buckets"], found["tokenising_each_round"]
    lines = [
        f"{texts['count']} texts of {texts['tokens_median']} word pieces in the median (at most "
        f"{texts['tokens_most']}), `data.length = {texts['length']}`:",
        "",
        "| comparison | ratio |",
        "|---|---|",
        f"| training, padding to the full length against length buckets | {pad['training']:.1f} |",
        f"| predicting, the same | {pad['asking']:.1f} |",
        "| tokenising all texts again, against a local epoch of the smallest encoder | "
        f"{tok['of_a_local_epoch']:.3f} |",
        "",
        "| LoRA, rank 8 | bytes on the wire | whole model | ratio | seconds, full against LoRA |",
        "|---|---|---|---|---|",
    ]
    for name, of in found["lora"].items():
        lines.append(
            f"| `{name}` | {of['bytes']:,} | {of['bytes_full']:,} | {of['bytes_full'] / of['bytes']:.0f} | "
            f"{of['full_over_lora']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=pathlib.Path, help="a JSON file for the results")
    parser.add_argument("--write", type=pathlib.Path, help="a page with the marks `texts`: the tables go between")
    args = parser.parse_args()
    found = measure()
    print(table(found))
    if args.record:
        args.record.write_text(json.dumps(found, indent=1) + "\n")
    if args.write:
        put(args.write, "texts", table(found))


if __name__ == "__main__":
    main()
