"""What messages consist of: bytes counted by hand."""

import json

import torch

from solera.config import load_config
from solera.content import content_of, public_rows
from solera.runner.loop import execute


def test_tables_of_tensors_are_parameters_and_other_floats_predictions():
    message = {
        "weights": {"a": torch.zeros(3), "n": torch.zeros((), dtype=torch.int64)},
        "others": [{"a": torch.zeros(2)}],
        "targets": torch.zeros(4, 5),
        "indices": torch.arange(7),
        "local": None,
    }
    assert content_of(message) == {"parameters": 12 + 8 + 8, "predictions": 80}
    assert public_rows(message) == 7
    assert public_rows({"weights": {}}) == 0


def lines(out, *overrides):
    execute(load_config("mnfl/laptop", ["run.rounds=1", "method.local.epochs=1", *overrides]), out)
    return json.loads((out / "metrics.jsonl").read_text())


def test_figure_3_public_samples_are_sent_if_clients_do_not_hold_them(tmp_path):
    held, sent = lines(tmp_path / "held"), lines(tmp_path / "sent", "public.where=server")
    rows = load_config("mnfl/laptop").public.size
    data = 12 * rows * 28 * 28  # clients, samples, bytes of one
    assert held["content"]["down"]["data"] == 0
    assert sent["content"]["down"]["data"] == data
    assert sum(sent["bytes"]["down"].values()) == sum(held["bytes"]["down"].values()) + data
    assert sent["content"]["up"] == {"data": 0, "parameters": 0, "predictions": 12 * rows * 10 * 4}
    assert sent["models"] == held["models"]
    assert sent["personal"] == held["personal"]
