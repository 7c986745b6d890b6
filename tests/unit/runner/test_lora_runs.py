"""Runs with models.lora: only small matrices and heads travel, with every method, engine and after a stop."""

import dataclasses
import json

import numpy as np
import pytest
import safetensors.torch
import torch

from encoders import write_encoder
from solera.core.errors import ConfigError, RunError
from solera.core.task import TASKS
from solera.models.lora import base_digest
from solera.runs import loop
from solera.runs.config import load_config
from solera.runs.loop import check_start, scenario_of
from solera.train.fitting import logits_of
from solera.use.export import export
from solera.use.predict import predict
from solera.use.trained import open_run

pytest.importorskip("peft", reason="needs the extra text")

LOCAL = {"steps": 2, "batch": 8, "lr": 0.01, "optimizer": "adam"}
FUSION = {"steps": 2, "batch": 8}
BASE = {
    "run": {"rounds": 2},
    "data": {"name": "toy-text", "length": 12, "train_size": 80, "test_size": 12},
    "partition": {"clients": 4, "alpha": 1.0},
    "public": {"size": 16},
    "models": {
        "clients": ["transformer", "wide"],
        "head": "shared",
        "lora": {"rank": 2},
        "options": {"transformer": {"width": 16}, "wide": {"model": "transformer", "width": 24}},
    },
}
LARGE = {"model": "transformer", "width": 32, "layers": 3}


def config(method, overrides=(), server=None, **settings):
    models = BASE["models"]
    if server is not None:
        models = models | {"server": "large", "options": models["options"] | {"large": LARGE | {"lora": server}}}
    return load_config(BASE | {"models": models, "method": {"name": method, "local": LOCAL} | settings}, overrides)


def small(name):
    """Whether a weight belongs to the small matrices or to what follows the body."""
    return ".lora_" in name or not name.startswith("body.")


@pytest.mark.parametrize(
    ("method", "server", "settings"),
    [
        ("fedavg", None, {}),
        ("feddf", None, {"fusion": FUSION}),
        ("fedet", True, {"fusion": FUSION}),
        ("fedet", False, {"fusion": FUSION}),
        ("fedeed", None, {"K": 2, "R": 2, "fusion": FUSION}),
        ("mnfl", None, {"public_size": 8}),
        ("fusionlarge", True, {"fusion": FUSION}),
    ],
)
def test_methods_send_and_keep_small_matrices_only(tmp_path, method, server, settings):
    more = {"mnfl": ["data.client_test=0.2"], "fedeed": []}  # which needs two rounds for its R
    asked = config(method, more.get(method, ["run.rounds=1"]), server, **settings)
    summary = loop.run(asked, tmp_path / "run").summary
    told = summary["lora"]
    assert set(told) == {"transformer", "wide"} | ({"large"} if server else set())
    for of in told.values():
        assert of["sent"] < of["whole"] / 5
    for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()):
        if method != "mnfl":  # which sends predictions
            sent = sum(told[A]["sent"] for A in ("transformer", "wide") for _ in range(2))
            assert line["content"]["up"]["parameters"] == sent
    for file in (tmp_path / "run" / "models").glob("*.safetensors"):
        names = safetensors.torch.load_file(file)
        assert all(map(small, names)) == (file.stem != "large" or server), "a full server model keeps its whole body"
    for file in (tmp_path / "run" / "checkpoints").glob("*.safetensors"):
        if server is not False:
            assert not [n for n in safetensors.torch.load_file(file) if "base_layer" in n or "embedding" in n]


PRODUCT, FROZEN_A = "models.lora={rank = 2, average = 'product'}", "models.lora={rank = 2, freeze_a = true}"


def test_engines_and_a_stop_change_no_bit(tmp_path):
    """With averages of the product, which are made in one place, and with those of each matrix."""
    settings, plain = {"fusion": FUSION}, loop.run(config("feddf", fusion=FUSION), tmp_path / "plain").digest
    for engine in ("threads", "processes"):
        other = config("feddf", [f"engine.name={engine}", "engine.workers=2"], **settings)
        assert loop.run(other, tmp_path / engine).digest == plain
    serial = loop.run(config("feddf", [PRODUCT], **settings), tmp_path / "product" / "serial").digest
    assert serial != plain
    for engine in ("threads", "processes"):
        other = config("feddf", [f"engine.name={engine}", "engine.workers=2", PRODUCT], **settings)
        assert loop.run(other, tmp_path / "product" / engine).digest == serial
    loop.run(config("feddf", ["run.rounds=1", PRODUCT], **settings), tmp_path / "cut")
    text = (tmp_path / "cut" / "config.toml").read_text()
    (tmp_path / "cut" / "config.toml").write_text(text.replace("rounds = 1", "rounds = 2"))
    assert loop.resume(tmp_path / "cut").digest == serial


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {}),
        ("feddf", {"fusion": {"steps": 0}}),
        ("feddf", {"fusion": {"steps": 0}, "screen": {"kind": "robust", "average": "median"}}),
        ("fedeed", {"K": 1, "fusion": {"steps": 0}}),
        ("hierarchical", {"fusion": {"steps": 0}, "groups": 1}),
    ],
)
def test_averages_of_one_architecture_are_of_the_product(tmp_path, monkeypatch, method, settings):
    """What clients upload is noted, and the mean of B A worked out here: by the eigenvectors of P^T P."""
    uploads, train = {}, TASKS["local_update"]

    def noted(client, **given):
        update = train.fn(client, **given)
        uploads.setdefault(client.architecture, []).append((update.weights, client.num_examples))
        return update

    monkeypatch.setitem(TASKS, "local_update", dataclasses.replace(train, fn=noted))
    loop.run(config(method, ["run.rounds=1", "engine.name=inprocess", PRODUCT], **settings), tmp_path / "run")
    assert {A: len(own) for A, own in uploads.items()} == {"transformer": 2, "wide": 2}
    for A, own in uploads.items():
        found = safetensors.torch.load_file(tmp_path / "run" / "models" / f"{A}.safetensors")
        pairs = {n for n in found if ".lora_A." in n}
        assert len(pairs) > 3
        for a in pairs:
            b, n = a.replace(".lora_A.", ".lora_B."), [float(n) for _, n in own]
            products = np.stack([w[b].double().numpy() @ w[a].double().numpy() for w, _ in own])
            P = np.median(products, axis=0) if "screen" in settings else np.average(products, axis=0, weights=n)
            vectors = np.linalg.eigh(P.T @ P)[1][:, -2:]
            assert np.allclose(found[b].double() @ found[a].double(), P @ vectors @ vectors.T, atol=1e-6)
            factors = [np.average([w[name].numpy() for w, _ in own], axis=0, weights=n) for name in (b, a)]
            assert np.abs(factors[0] @ factors[1] - P).max() > 1e-5, "which is not the mean of each"


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("scaffold", {"local": LOCAL | {"optimizer": "sgd"}}),
        ("fedavgm", {"momentum": 0.5}),
        ("fedbe", {"fusion": FUSION}),
        ("fedamp", {}),
        ("local", {}),
    ],
)
def test_methods_that_do_not_average_models_refuse_the_product(method, settings):
    asked = config(method, [PRODUCT, "data.client_test=0.2"], **settings)
    with pytest.raises(ConfigError, match="does not average whole models, so 'transformer' cannot have") as e:
        check_start(asked.method, scenario_of(asked), asked.federation)
    assert "\n" not in str(e.value)
    check_start(
        asked.method, scenario_of(config(method, [FROZEN_A, "data.client_test=0.2"], **settings)), asked.federation
    )


@pytest.mark.parametrize("lora", ["models.lora={rank = 2}", PRODUCT, FROZEN_A])
def test_trained_models_are_ordinary_ones(tmp_path, lora):
    asked = config("fedavg", ["run.rounds=1", lora])
    loop.run(asked, tmp_path / "run")
    trained = open_run(tmp_path / "run")
    model = trained.model("wide")
    assert not [n for n in model.state_dict() if "lora" in n]
    here = scenario_of(asked).server.template("wide")
    here.load_state_dict(safetensors.torch.load_file(trained.file("wide")))
    ids = trained.tokens(["the wind crossed the valley", "my aunt salted a bowl of soup"])
    assert torch.allclose(logits_of(model, ids), logits_of(here, ids), atol=1e-5)
    (tmp_path / "new.txt").write_text("the wind crossed the valley\n")
    assert len(predict(trained, tmp_path / "new.txt", "wide").names) == 1
    export(trained, "safetensors", tmp_path / "out", ["wide"])
    exported = safetensors.torch.load_file(tmp_path / "out" / "wide.safetensors")
    assert exported.keys() == model.state_dict().keys()


@pytest.fixture
def encoder_run(tmp_path):
    folder = write_encoder(tmp_path / "encoder")
    models = {"clients": [f"hf:{folder}"], "lora": {"rank": 2}}
    tables = BASE | {"models": models, "method": {"name": "fedavg", "local": LOCAL}}
    loop.run(load_config(tables, ["run.rounds=1"]), tmp_path / "run")
    return folder, tmp_path / "run"


def test_another_base_is_refused_before_any_work(encoder_run):
    folder, run = encoder_run
    told = json.loads((run / "run.json").read_text())["experiment"]["lora"]
    assert told["encoder"]["base"] == base_digest(
        scenario_of(load_config(run / "config.toml")).server.template("encoder")
    )
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["embeddings.LayerNorm.bias"] += 0.5
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        RunError, match=r"'encoder' was trained on a frozen base \(LoRA\) with the digest .* but the one"
    ):
        open_run(run).model("encoder")
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("rounds = 1", "rounds = 2"))
    with pytest.raises((ConfigError, RunError), match=r"lora|weights"):
        loop.resume(run)


def test_a_model_that_cannot_have_it_is_named_with_the_way_out():
    tables = BASE | {"models": {"clients": ["transformer", "lstm"], "lora": {"rank": 2}}, "method": {"name": "fedavg"}}
    with pytest.raises(ConfigError, match=r"model 'lstm' has no linear.*\[models.options.lstm\] lora = false"):
        scenario_of(load_config(tables))
    tables["models"] = tables["models"] | {"options": {"lstm": {"lora": False}}}
    template = scenario_of(load_config(tables)).server.template
    assert base_digest(template("lstm")) is None
    assert base_digest(template("transformer")) is not None
