"""Models of texts on a second device: the bits of the CPU, and no step that reads from it.

`contract/test_on_a_device.py` runs this file in a process of its own.
"""

import pytest
import torch

import solera.methods  # noqa: F401  (registers them)
from closeness import apart
from encoders import write_encoder
from simulated_device import SIM, simulated_device
from solera.models.zoo.texts import in_buckets
from solera.runs import loop
from solera.runs.config import load_config
from solera.runs.loop import scenario_of, simulate

SIM.register()  # before the first backward pass

LSTM = {"hidden": 16, "embedding": 8}
FUSED = {"steps": 3, "batch": 8, "every": 10**6, "patience": 10**6}
# For each a method with its settings, and what one round with two clients reads and waits for on an accelerator.
KINDS = {
    "transformer": ({"clients": ["transformer"]}, "feddf", "classification", 14, 552),
    "lstm": ({"clients": ["lstm"], "options": {"lstm": LSTM}}, "feddf", "classification", 14, 214),
    "encoder": ({"clients": ["ENCODER"]}, "feddf", "classification", 14, 469),
    "encoder with LoRA": ({"clients": ["ENCODER"], "lora": {"rank": 2}}, "feddf", "classification", 14, 339),
    "two tokenizers": (
        {"clients": ["ENCODER", "lstm"], "server": "transformer", "head": "shared", "options": {"lstm": LSTM}},
        "fusionlarge",
        "classification",
        24,
        978,
    ),
    "next tokens": ({"clients": ["gpt-nano"]}, "feddf", "causal-lm", 20, 493),
    "next tokens, lstm": ({"clients": ["lstm-lm"]}, "feddf", "causal-lm", 20, 125),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("models") / "encoder")


def configured(kind, folder, device, steps=3):
    models, method, task, *_ = KINDS[kind]
    models = {**models, "clients": [f"hf:{folder}" if A == "ENCODER" else A for A in models["clients"]]}
    return load_config(
        {
            "run": {"rounds": 1},
            "data": {"name": "toy-text", "length": 12, "train_size": 60, "test_size": 12, "task": task},
            "partition": {"kind": "iid", "clients": 2},
            "public": {"size": 16},
            "models": models,
            "method": {
                "name": method,
                "local": {"steps": steps, "batch": 8, "lr": 0.05},
                "fusion": {**FUSED, "steps": steps},
            },
            "engine": {"name": "inprocess", "workers": 1, "device": device},
        }
    )


def slow_but(*fast):
    """All kinds, of which only some are in `make rest`."""
    return [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in fast)) for kind in KINDS]


@pytest.mark.parametrize("kind", slow_but("transformer", "lstm", "encoder with LoRA", "two tokenizers"))
def test_texts_have_the_bits_of_the_cpu(kind, folder, tmp_path):
    wanted = loop.run(configured(kind, folder, "cpu"), tmp_path / "cpu").summary
    with simulated_device() as sim:
        found = loop.run(configured(kind, folder, "sim"), tmp_path / "sim").summary
    assert sim.counts()["operators"] > 100
    assert not found["failures"]
    assert found["digest"] == wanted["digest"]


@pytest.mark.parametrize("kind", slow_but("encoder", "transformer"))
def test_no_step_of_a_training_reads_from_an_accelerator(kind, folder, tmp_path):
    def counted(steps):
        with simulated_device("accelerator") as sim:
            found = loop.run(configured(kind, folder, "sim", steps), tmp_path / str(steps)).summary
            assert not found["failures"]
            return sim.counts()

    once, more = counted(3), counted(9)
    assert more["operators"] > once["operators"]
    assert (once["reads"], once["waits"]) == (more["reads"], more["waits"]) == KINDS[kind][3:]


@pytest.mark.parametrize("kind", slow_but("encoder"))
def test_results_agree_within_the_tolerance(kind, folder, tmp_path):
    def result(device):
        config = configured(kind, folder, device)
        return simulate(scenario_of(config), config.method, tmp_path / device, config.run, engine=config.engine)

    wanted = result("cpu")
    with simulated_device("accelerator"):
        assert apart(wanted, result("sim")) <= 1e-3


def test_an_accelerator_trains_on_texts_in_full_length_and_asks_by_buckets():
    ids = torch.tensor([[1] * 5 + [0] * 27, [1] * 32, [1] * 9 + [0] * 23])

    def read(x):
        seen.append(tuple(x.shape))
        return x.sum(1, keepdim=True)

    with simulated_device("accelerator") as sim:
        there, seen = ids.to("sim"), []
        sim.reset()
        trained = in_buckets(read, there, 0, training=True)
        assert (seen, sim.counts()["reads"], sim.counts()["waits"]) == ([(3, 32)], 0, 0)
        seen = []
        asked = in_buckets(read, there, 0, training=False)
        assert seen == [(1, 8), (1, 16), (1, 32)]
        assert (sim.counts()["reads"], sim.counts()["waits"]) == (0, 1)
    assert trained.cpu().tolist() == asked.cpu().tolist() == [[5], [32], [9]]
