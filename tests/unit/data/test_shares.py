"""Pooled splits, every class on every client, and which client has which model: by counting."""

import tomllib

import pytest
import torch

from solera.core.errors import ConfigError
from solera.data import PartitionConfig, from_tensors, from_texts, partition
from solera.data.partition import class_counts
from solera.runs import loop
from solera.runs.config import load_config, recipe_text, to_toml
from solera.runs.loop import scenario_of
from solera.scenario.scenario import dealt

SPLIT = "data.split=[0.7, 0.1, 0.2]"


def of_toy(*overrides):
    return scenario_of(load_config("toy", ["data.test_size=500", *overrides]))


def test_a_pooled_split_has_its_shares_and_loses_nothing():
    s = of_toy(SPLIT, "public.size=none")
    assert (len(s.dataset.test), len(s.public), int(s.roster.sizes.sum())) == (500, 250, 1750)  # 7:1:2 of 2,500
    before = of_toy("public.size=none").dataset
    pool = lambda d: torch.cat([d.train.inputs, d.test.inputs]).flatten(1).double().sum(1).sort().values  # noqa: E731
    assert torch.equal(pool(s.dataset), pool(before))
    assert not torch.equal(s.dataset.test.inputs, before.test.inputs)
    assert (s.dataset.test.labels.bincount() - s.dataset.test.labels.bincount().float().mean()).abs().max() <= 1


def test_a_split_follows_the_seed():
    inputs, labels = torch.arange(40.0)[:, None], torch.arange(40) % 2
    data = from_tensors((inputs[:30], labels[:30]), (inputs[30:], labels[30:]), classes=2)
    one, same, other = (data.pooled(0.25, seed).test.inputs for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.split=[0.7, 0.3]"], r"data.split = \[0.7, 0.3\]: give the shares of training, public and test"),
        (["data.split=[0.8, 0.1, 0.2]"], "they add up to 1"),
        (["data.split=[0.0, 0.5, 0.5]"], "only the public one may be 0"),
        ([SPLIT], "public.size = 400: data.split already says"),
        ([SPLIT, "public.size=none", "public.source=noise"], "need public.source = 'held-out'; .* 'noise' write 0"),
    ],
)
def test_splits_that_cannot_be(overrides, words):
    with pytest.raises(ConfigError, match=words):
        of_toy(*overrides)


def test_texts_are_not_pooled():
    texts = from_texts((["a b", "c d"], [0, 1]), (["a c", "b d"], [0, 1]))
    with pytest.raises(ConfigError, match="has texts, and its samples cannot be pooled"):
        texts.pooled(0.5, 0)


@pytest.mark.parametrize("kind", ["dirichlet", "iid", "quantity"])
def test_every_client_has_every_class(kind):
    labels = torch.arange(6000) % 10
    for variant in ("block", "class", "client"):
        plain = PartitionConfig(kind, clients=100, alpha=0.3, variant=variant)
        full = PartitionConfig(kind, clients=100, alpha=0.3, variant=variant, min_per_class=2)
        counts = class_counts(partition(full, labels, 10, 1), labels, 10)
        assert counts.min() >= 2
        assert counts.sum() == 6000
        if kind == "dirichlet":
            assert class_counts(partition(plain, labels, 10, 1), labels, 10).min() == 0


def test_a_class_without_samples_does_not_count():
    labels = torch.tensor([0, 2] * 20)
    counts = class_counts(partition(PartitionConfig(clients=4, min_per_class=5), labels, 3, 0), labels, 3)
    assert counts.tolist() == [[5, 0, 5]] * 4  # nothing is left to divide


def test_too_few_samples_for_every_client():
    with pytest.raises(ConfigError, match="min_per_class = 3: class 1 has 5 samples for 2 clients"):
        partition(PartitionConfig(clients=2, min_per_class=3), torch.tensor([0] * 9 + [1] * 5), 2, 0)
    with pytest.raises(ConfigError, match="with kind = 'classes' clients do not have all classes"):
        PartitionConfig("classes", min_per_class=1)


def test_who_has_which_model():
    sizes = torch.tensor([5, 1, 9, 1, 7, 3])
    assert dealt("even", sizes, 4, 0).tolist() == [0, 1, 2, 3, 0, 1]
    assert dealt("tiers", sizes, 3, 0).tolist() == [0, 0, 1, 1, 2, 2]
    assert dealt("by-size", sizes, 3, 0).tolist() == [1, 0, 2, 0, 2, 1]
    assert dealt("by-size", sizes[:5], 2, 0).tolist() == [0, 0, 1, 0, 1]


def test_small_models_go_to_small_clients_whatever_their_order():
    s = of_toy("models.assign=by-size", 'models.clients=["mlp", "lenet5"]')  # lenet5 has fewer parameters
    small = [s.roster[k].num_examples for k in s.roster if s.roster[k].architecture == "lenet5"]
    large = [s.roster[k].num_examples for k in s.roster if s.roster[k].architecture == "mlp"]
    assert max(small) <= min(large)
    assert len(small) == len(large) == 4


def test_a_table_names_the_model_of_each_client():
    ids = list(of_toy().roster)
    table = {k: "mlp" if i % 3 else "lenet5" for i, k in enumerate(ids)}
    given = {**tomllib.loads(recipe_text("toy")), "models": {"clients": ["mlp", "lenet5"], "assign": table}}
    config = load_config(given)
    assert {k: info.architecture for k in ids if (info := scenario_of(config).roster[k])} == table
    assert load_config(tomllib.loads(to_toml(config))).models.assign == table
    given["models"]["assign"] = {ids[0]: "mlp"}
    with pytest.raises(ConfigError, match=r"models.assign: no model for"):
        scenario_of(load_config(given))


def test_own_models_can_be_scored_on_the_common_test_set(tmp_path):
    kept, common = of_toy("data.client_test=0.2"), of_toy("data.client_test=common")
    assert int(common.roster.sizes.sum()) == int(kept.partition.sizes.sum()) > int(kept.roster.sizes.sum())
    k = next(iter(common.roster))
    assert torch.equal(common.client(k, 0, {}).test.labels, common.test.labels)
    assert torch.equal(common.client(k, 0, {}).test.inputs, common.test.inputs)
    summary = loop.run(
        load_config("toy", ["method.name=local", "data.client_test=common", "run.rounds=1", "data.train_size=500"]),
        tmp_path / "run",
    ).summary
    assert summary["personal"]["clients"] == 4  # those of the cohort have a model
