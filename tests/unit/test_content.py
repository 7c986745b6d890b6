"""What messages consist of: bytes counted by hand."""

import dataclasses
import json

import torch

from solera.core.accounting import content_of
from solera.runs import loop
from solera.runs.config import load_config
from solera.runs.read import read_run
from solera.runs.rehearsal import rehearse_config


def test_tables_of_tensors_are_parameters_and_other_floats_predictions():
    message = {
        "weights": {"a": torch.zeros(3), "n": torch.zeros((), dtype=torch.int64)},
        "others": [{"a": torch.zeros(2)}],
        "targets": torch.zeros(4, 5),
        "indices": torch.arange(7),
        "local": None,
    }
    assert content_of(message) == {"parameters": 12 + 8 + 8, "predictions": 80}


SERVER = "public.where=server"
SHORT = ["method.local.epochs=1", "engine.name=inprocess"]


def lines(out, *overrides):
    loop.run(load_config("mnfl/laptop", ["run.rounds=1", *SHORT, *overrides]), out)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_figure_3_public_samples_are_sent_if_clients_do_not_hold_them(tmp_path):
    (held,), (sent,) = lines(tmp_path / "held"), lines(tmp_path / "sent", SERVER)
    rows = load_config("mnfl/laptop").public.size
    data = 12 * rows * 28 * 28  # clients, samples, bytes of one
    assert held["content"]["down"]["data"] == 0
    assert sent["content"]["down"]["data"] == data
    more = sum(sent["bytes"]["down"].values()) - sum(held["bytes"]["down"].values())
    assert 12 * 8 < more - data < 12 * 200, "and a header for each client"
    assert sent["content"]["up"] == {"data": 0, "parameters": 0, "predictions": 12 * rows * 10 * 4}
    assert sent["models"] == held["models"]
    assert sent["personal"] == held["personal"]


def test_a_client_is_sent_the_public_samples_once_with_its_first_call(tmp_path):
    """Of 12 clients 3 are drawn in each round: those that were drawn before have them."""
    found = lines(tmp_path, SERVER, "run.rounds=4", "federation.fraction=0.25")
    one = load_config("mnfl/laptop").public.size * 28 * 28
    new = [[k for e in line["events"] if e["kind"] == "public_sent" for k in e["clients"]] for line in found]
    everyone = [k for clients in new for k in clients]
    assert [line["content"]["down"]["data"] for line in found] == [len(clients) * one for clients in new]
    assert len(new[0]) == 3
    assert 3 < len(everyone) == len(set(everyone)) < 12, "some were drawn twice"


def test_what_was_sent_is_known_after_a_resume(tmp_path):
    config = load_config("mnfl/laptop", ["run.rounds=4", *SHORT, SERVER, "federation.fraction=0.25"])
    loop.run(config, tmp_path / "whole")
    half = dataclasses.replace(config, run=dataclasses.replace(config.run, rounds=2))
    loop.run(half, tmp_path / "parts")
    loop.run(config, tmp_path / "parts", resume=True)
    whole, parts = ([r.traffic for r in read_run(tmp_path / out).rounds] for out in ("whole", "parts"))
    assert parts == whole


def test_a_dry_run_counts_what_the_run_counts(tmp_path):
    config = load_config("mnfl/laptop", ["run.rounds=3", *SHORT, SERVER, "federation.fraction=0.25"])
    dry = rehearse_config(config)
    loop.run(config, tmp_path)
    assert [sent.bytes for sent in dry.rounds] == [r.traffic.bytes for r in read_run(tmp_path).rounds]
    assert dry.facts()["exact"]


def test_a_dry_run_loses_the_clients_that_the_run_loses(tmp_path):
    config = load_config("mnfl/laptop", ["run.rounds=2", *SHORT, SERVER, "federation.availability.dropout=0.5"])
    dry = rehearse_config(config)
    loop.run(config, tmp_path)
    rounds = read_run(tmp_path).rounds
    assert any(r.failures for r in rounds)
    assert [sent.bytes for sent in dry.rounds] == [r.traffic.bytes for r in rounds]
