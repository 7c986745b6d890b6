"""Runs with data.task = "causal-lm": small language models that teach each other token by token."""

import json
import math

import pytest
import torch

from solera.core.errors import ConfigError
from solera.models import build, size_of
from solera.runs import loop
from solera.runs.config import load_config
from solera.runs.loop import check_start, scenario_of

BASE = {
    "run": {"rounds": 2},
    "data": {"name": "toy-text", "task": "causal-lm", "length": 24, "train_size": 48, "test_size": 8},
    "partition": {"clients": 4, "alpha": 1.0},
    "public": {"size": 16},
    "models": {"clients": ["gpt-nano", "lstm-lm"]},
}
LOCAL = {"steps": 2, "batch": 8, "lr": 0.003, "optimizer": "adam"}


def config(method, overrides=(), **settings):
    return load_config(BASE | {"method": {"name": method, "local": LOCAL} | settings}, overrides)


def test_without_distillation_feddf_is_fedavg_to_the_bit(tmp_path):
    averaged = loop.run(config("fedavg"), tmp_path / "a").summary
    fused = loop.run(config("feddf", fusion={"steps": 0}), tmp_path / "b").summary
    assert fused["digest"] == averaged["digest"]
    assert averaged["models"] == fused["models"]


def test_every_engine_gives_the_same_bits_and_a_run_can_be_continued(tmp_path):
    asked = config("feddf", fusion={"steps": 3, "batch": 4})
    serial = loop.run(asked, tmp_path / "serial").summary
    forked = config("feddf", ["engine.name=processes", "engine.workers=2"], fusion={"steps": 3, "batch": 4})
    assert loop.run(forked, tmp_path / "forked").digest == serial["digest"]
    short = config("feddf", ["run.rounds=1"], fusion={"steps": 3, "batch": 4})
    loop.run(short, tmp_path / "cut")
    text = (tmp_path / "cut" / "config.toml").read_text()
    (tmp_path / "cut" / "config.toml").write_text(text.replace("rounds = 1", "rounds = 2"))
    assert loop.resume(tmp_path / "cut").digest == serial["digest"]


def test_perplexity_is_in_the_metrics_and_the_summary(tmp_path):
    summary = loop.run(config("feddf", fusion={"steps": 2, "batch": 4}), tmp_path / "run").summary
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for kind in ("models", "ensembles"):
        for name, score in summary[kind].items():
            each = [line[kind][name] for line in lines]
            assert score["perplexity"] == pytest.approx(math.exp(score["loss"]))
            assert score["best_perplexity"] == min(s["perplexity"] for s in each)
            assert 1 < score["perplexity"] < 300  # 256 is guessing
    assert not (tmp_path / "run" / "confusion.json").exists()
    partition = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert partition["classes"] == 4  # topics divide the texts, tokens do not


@pytest.mark.parametrize("method", ["fedprox", "fedavgm", "scaffold", "local", "centralised", "fusionlarge"])
def test_other_methods_that_learn_language_models(tmp_path, method):
    settings = {"fusion": {"steps": 2, "batch": 4}} if method == "fusionlarge" else {}
    settings |= {"local": LOCAL | {"optimizer": "sgd"}} if method == "scaffold" else {}
    summary = loop.run(config(method, ["run.rounds=1"], **settings), tmp_path / "run").summary
    if method == "local":
        assert 0 <= summary["personal"]["mean"] <= 1
    else:
        assert all(score["perplexity"] < 300 for score in summary["models"].values())
    if method == "fusionlarge":
        assert "gpt-micro" in summary["models"]  # larger than the clients' models, and read with their tokenizer


def test_methods_that_cannot_say_so():
    asked = load_config(BASE | {"method": {"name": "fedet"}})
    with pytest.raises(ConfigError, match=r"'fedet' works with one prediction for each sample, not for each token"):
        check_start(asked.method, scenario_of(asked), asked.federation)
    asked = config("feddf", teaching={"kind": "low-entropy", "top": 4})
    with pytest.raises(ConfigError, match=r'^method\.teaching\.kind = "low-entropy": .* leave it out for causal-lm'):
        check_start(asked.method, scenario_of(asked), asked.federation)


def test_models_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"gpt-nano reads texts with the tokenizer 'bytes', lstm with 'words'"):
        scenario_of(config("feddf", ['models.clients=["gpt-nano","lstm"]']))
    with pytest.raises(ConfigError, match=r"needs texts, but toy-2d has samples"):
        scenario_of(config("feddf", ["data.name=toy-2d"]))
    with pytest.raises(ConfigError, match=r"gpt-nano.*returns logits of shape \[n, 64, 4\]"):
        scenario_of(config("feddf", ["data.task=classification", "data.length=64"]))


def test_parameter_counts_by_hand():
    def gpt(width, layers, length):
        block = 2 * 2 * width + (width + 1) * 3 * width + (width + 1) * width
        block += (width + 1) * 4 * width + (4 * width + 1) * width
        return 256 * width + length * width + layers * block + 2 * width + (width + 1) * 256

    def parameters(name):
        return size_of(build(name, 256, (32,), vocabulary=256)).parameters

    assert parameters("gpt-nano") == gpt(64, 2, 32)
    assert parameters("gpt-micro") == gpt(128, 4, 32)
    assert parameters("lstm-lm") == 256 * 64 + 4 * 128 * (64 + 128 + 2) + 129 * 256


def test_no_position_sees_what_comes_after_it():
    torch.manual_seed(0)
    for name in ("gpt-nano", "lstm-lm"):
        model = build(name, 256, (12,), vocabulary=256)
        model.eval()
        x = torch.randint(0, 256, (3, 12))
        other = x.clone()
        other[:, 7:] = torch.randint(0, 256, (3, 5))
        with torch.no_grad():
            assert torch.equal(model(x)[:, :7], model(other)[:, :7])
            assert not torch.equal(model(x)[:, 7:], model(other)[:, 7:])
