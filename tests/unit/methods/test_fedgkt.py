"""FedGKT: equal to its steps by hand, logits that stay with their samples, its wire, what it refuses."""

import dataclasses
import re

import pytest
import torch

from solera.core.errors import ConfigError
from solera.core.federation import Federation, FederationConfig, QuorumNotMet
from solera.core.task import TASKS, Data
from solera.core.tensors import weights_of
from solera.core.wire import digest
from solera.engines.faulty import Faulty
from solera.methods.fedgkt import FedGKT, extract, feature_shape, score_with_tower, taught, tower, train_and_extract
from solera.methods.local import LocalOnly
from solera.models import wrap
from solera.runs.loop import check_server
from solera.testing import check_method, run_toy, wide
from solera.train.fitting import Diverged, Local, evaluate, fit, logits_of
from toys import Conv, World, images, kept_by, mlp, same_bits

LOCAL = Local(epochs=2, batch=4, lr=0.05)
SERVER = Local(epochs=3, batch=8, lr=0.01, optimizer="adam")
SIZES, KINDS = (5, 12, 9, 20, 7), "cmcmc"
CLIENTS = [f"c{i}" for i in range(5)]
C, H = 4, 8
BUILDERS = {
    "c": lambda: wrap(Conv(0), "8", representation=H, head_hidden=8),
    "m": lambda: wrap(mlp(1), "3", representation=H, head_hidden=8),
}
METHOD = FedGKT(LOCAL, SERVER, server_hidden=16, server_layers=2, alpha=0.7)


class Sequence(torch.nn.Module):
    """Features that are neither vectors nor maps."""

    def __init__(self):
        super().__init__()
        self.sequence, self.last = torch.nn.Flatten(1, 2), torch.nn.Linear(8, C)

    def forward(self, x):
        return self.last(self.sequence(x).mean(1))


class Site(World):
    """Five clients of different sizes and two architectures (one with BatchNorm); no public data."""

    def __init__(self, tmp, sizes=SIZES, builders=BUILDERS, **options):
        parties = [(P, Data(*images(n, n))) for n, P in zip(sizes, KINDS, strict=True)]
        super().__init__(tmp, builders, parties, **{"shape": (1, 8, 8), **options})

    def model(self, k):
        """The model client k holds."""
        return kept_by(self.fed, k)["model"]

    def trained(self, k, seed, teacher=None, weights=None):
        P = self.fed.architecture(k)
        model = self.server.model(P, self.server.init(P) if weights is None else weights)
        x, y = self.data[k].inputs, self.data[k].labels
        fit(model, x, torch.arange(len(y)), LOCAL, seed, taught(y, teacher, 0.7, 3.0))
        return model


def floats(site: Site) -> tuple[int, int, int, int]:
    """(floats down, floats up, integers down, integers up) of the last round."""
    down, up = site.fed.down.values(), site.fed.up.values()
    return tuple(sum(getattr(t, kind) for t in way) for kind in ("floats", "integers") for way in (down, up))


# ---- a round is its definition ----------------------------------------------------------------------


def test_a_round_is_its_steps_by_hand(tmp_path):
    site = Site(tmp_path)
    start, first, second = site.run(METHOD, 2)
    models = {k: site.trained(k, seed) for k, seed in zip(CLIENTS, site.seeds[:5], strict=True)}  # labels alone
    sent = {k: extract(models[k], site.data[k].inputs, "adapter") for k in CLIENTS}
    top = tower((H,), C, 16, 2)
    top.load_state_dict(start.weights)
    site.fed.begin(0)
    H_all, z_all = (torch.cat([sent[k][i] for k in CLIENTS]) for i in (0, 1))
    y_all = torch.cat([site.data[k].labels for k in CLIENTS])
    fit(top, H_all, torch.arange(len(y_all)), SERVER, site.fed.seed("server"), taught(y_all, z_all, 0.7, 3.0))
    assert same_bits(first.weights, weights_of(top))
    for k, seed in zip(CLIENTS, site.seeds[5:], strict=True):  # the next round: labels and the server's logits
        z_s = logits_of(top, sent[k][0])
        assert torch.equal(first.kept[k], z_s)
        again = site.trained(k, seed, z_s, weights_of(models[k]))
        assert same_bits(site.model(k), weights_of(again))
    assert not start.trained
    assert second.trained


def rows(examples):
    """What a client is told of the size of its answer."""
    return {"examples": examples, "shape": [8], "classes": C}


def test_fedml_pairs_logits_by_batch_number_here_they_follow_the_sample_under_shuffling(tmp_path):
    """The server's logits are right about each sample and the labels wrong: pairing decides what is learned."""
    site = Site(tmp_path, sizes=(5, 12, 9, 120, 7))
    data = site.data["c3"]
    wrong = Data(data.inputs, (data.labels + 1) % C)
    client = dataclasses.replace(site.client("c3", 3, {}), train=wrong)
    teacher = torch.nn.functional.one_hot(data.labels, C).float() * 20
    local = Local(epochs=20, batch=8, lr=0.01)  # fifteen batches, in another order every epoch
    how = {"alpha": 5.0, "temperature": 3.0, "layer": "adapter", **rows(120)}
    said = train_and_extract(client, local=local, teacher=teacher, **how)
    assert (said.logits.argmax(-1) == data.labels).float().mean() > 0.9
    shuffled = teacher[torch.randperm(120, generator=torch.Generator().manual_seed(0))]  # as by batch number
    client = dataclasses.replace(client, state={})
    said = train_and_extract(client, local=local, teacher=shuffled, **how)
    assert (said.logits.argmax(-1) == data.labels).float().mean() < 0.7


def test_rows_come_in_the_order_of_the_data_whatever_the_order_of_training(tmp_path):
    site = Site(tmp_path)
    nothing = torch.empty(0, C)
    how = {"local": LOCAL, "teacher": nothing, "alpha": 1.0, "temperature": 3.0, "layer": "adapter", **rows(9)}
    for seed in (1, 2):
        client = site.client("c3", seed, {})
        said = train_and_extract(client, **how)
        model = client.model(client.state["model"])
        assert torch.equal(said.logits, logits_of(model, client.train.inputs))
        assert torch.equal(said.labels, client.train.labels.int())


def test_the_first_round_is_local_training(tmp_path):
    a, b = Site(tmp_path / "a"), Site(tmp_path / "b")
    a.run(METHOD)
    b.run(LocalOnly(LOCAL))
    assert all(same_bits(a.model(k), b.model(k)) for k in CLIENTS)


def test_the_server_s_epochs_follow_the_schedule(tmp_path):
    site = Site(tmp_path)
    samples = sum(SIZES)
    per_epoch = -(-samples // SERVER.batch)
    method = dataclasses.replace(METHOD, server_rounds=[1, 2], server_epochs=[2, 1])
    steps, state = [], None
    for t in range(4):
        state = state or method.init(site.fed, site.server)
        site.fed.begin(t)
        site.server.begin()
        state = method.round(state, site.fed, site.server)
        (event,) = site.events("server_trained")
        assert event["samples"] == samples
        steps.append(event["steps"] // per_epoch)
    assert steps == [3, 2, 1, 1]


# ---- where only some take part ----------------------------------------------------------------------


def test_logits_on_the_fly_are_those_of_the_restored_extractor(tmp_path):
    site = Site(tmp_path, fraction=0.6)
    seen = {}
    state = site.run(METHOD)[-1]
    assert state.kept == {}
    site.fed.begin(1)
    S = site.fed.sample()
    top = tower((H,), C, 16, 2)
    top.load_state_dict(state.weights)
    for k in S:
        P = site.fed.architecture(k)
        model = site.server.model(P, kept_by(site.fed, k).get("model", site.server.init(P)))
        seen[k] = logits_of(top, extract(model, site.data[k].inputs, "adapter")[0])
    who, found = METHOD.teachers(S, state, top, (H,), site.fed, site.server)
    assert who == S
    assert all(torch.equal(found[k], seen[k]) for k in S)
    assert set(S) - {k for k in CLIENTS if (tmp_path / k).is_dir()}, "a newcomer should be among them"


def test_cached_are_the_features_of_the_last_time_seen_by_the_tower_of_today(tmp_path):
    site = Site(tmp_path, fraction=0.6)
    method = dataclasses.replace(METHOD, partial="cached")
    _, first, second = site.run(method, 2)
    site.fed.begin(0)
    S0 = site.fed.sample()
    site.fed.begin(1)
    S1 = site.fed.sample()
    assert set(first.kept) == set(S0)
    assert set(second.kept) == set(S0) | set(S1)
    left = set(S0) - set(S1)
    assert left, "choose another seed"
    assert all(torch.equal(first.kept[k], second.kept[k]) for k in left)
    top = tower((H,), C, 16, 2)
    top.load_state_dict(second.weights)
    who, found = method.teachers(CLIENTS, second, top, (H,), site.fed, site.server)
    assert who == CLIENTS
    assert set(found) == set(second.kept)  # the others: labels alone
    assert all(torch.equal(found[k], logits_of(top, second.kept[k])) for k in found)


def test_if_all_take_part_logits_on_the_fly_would_be_the_same(tmp_path):
    """So the second upload is spared."""
    site = Site(tmp_path)
    state = site.run(METHOD)[-1]
    top = tower((H,), C, 16, 2)
    top.load_state_dict(state.weights)
    _, kept = METHOD.teachers(CLIENTS, state, top, (H,), site.fed, site.server)
    site.fed.config = dataclasses.replace(site.fed.config, fraction=0.9)  # 4.5 of 5, rounded up
    assert METHOD.mode(site.fed) == "all"
    site.fed.config = dataclasses.replace(site.fed.config, fraction=0.6)
    site.fed.begin(1)
    _, now = METHOD.teachers(CLIENTS, state, top, (H,), site.fed, site.server)
    assert all(torch.equal(kept[k], now[k]) for k in CLIENTS)


# ---- the wire ---------------------------------------------------------------------------------------


def test_gkt_2_only_features_logits_and_labels_travel(tmp_path):
    n = sum(SIZES)
    site = Site(tmp_path)
    state = site.run(METHOD)[-1]
    assert floats(site) == (0, n * (H + C), 0, n)  # nothing to teach yet
    site.fed.begin(1)
    METHOD.round(state, site.fed, site.server)
    assert floats(site) == (n * C, n * (H + C), 0, n)
    assert list(site.fed.up) == ["train_and_extract"]


@pytest.mark.parametrize("partial", ["on_the_fly", "cached"])
def test_gkt_2_on_the_fly_features_go_up_once_more(tmp_path, partial):
    site = Site(tmp_path, fraction=0.6)
    method = dataclasses.replace(METHOD, partial=partial)
    state = site.run(method)[-1]
    site.fed.begin(1)
    S = site.fed.sample()
    n = sum(site.fed.num_examples(k) for k in S)
    taught_now = n if partial == "on_the_fly" else sum(site.fed.num_examples(k) for k in S if k in state.kept)
    method.round(state, site.fed, site.server)
    extra = n * H if partial == "on_the_fly" else 0
    assert floats(site) == (taught_now * C, n * (H + C) + extra, 0, n)


def test_feature_maps_are_a_layer_s_output(tmp_path):
    """As in the paper: 6x8x8 maps of the first convolution go up, and the tower is convolutional."""
    site = Site(tmp_path, builders={"c": BUILDERS["c"], "m": BUILDERS["c"]})
    method = dataclasses.replace(METHOD, features="body.2", server_hidden=8, server_layers=1)
    state = site.run(method, 2)[-1]
    n = sum(SIZES)
    assert floats(site) == (n * C, n * (6 * 8 * 8 + C), 0, n)
    client = site.client("c1", 0, {"model": site.model("c1")})
    assert score_with_tower(client, **method.personal(state, site.fed).payload).total == 12


# ---- clients that misbehave -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: dataclasses.replace(r, features=r.features[:-1]), r"features: \(11, 8\) .*expected \(12, 8\)"),
        (lambda r: dataclasses.replace(r, features=r.features[:, :5]), r"features: \(12, 5\)"),
        (lambda r: dataclasses.replace(r, logits=r.logits[:, :3]), r"logits: \(12, 3\) .*expected \(12, 4\)"),
        (lambda r: dataclasses.replace(r, labels=r.labels + 2), "labels that are not of the classes 0 to 3"),
        (lambda r: dataclasses.replace(r, labels=r.labels - 1), "labels"),
        (lambda r: dataclasses.replace(r, labels=r.labels[:3]), "labels"),
        (lambda r: dataclasses.replace(r, features=r.features * 1e38), "the tower's logits are not finite"),
        (lambda r: dataclasses.replace(r, logits=torch.full_like(r.logits, 1e30)), "too large for a softmax"),
        (lambda r: dataclasses.replace(r, logits=torch.full_like(r.logits, -1e30)), "too large for a softmax"),
    ],
)
def test_a_reply_that_does_not_fit_loses_its_seat(tmp_path, monkeypatch, change, reason):
    honest = train_and_extract.fn

    def lie(client, **inbox):
        reply = honest(client, **inbox)
        return change(reply) if client.id == "c1" else reply

    a, b = Site(tmp_path / "a"), Site(tmp_path / "b")
    monkeypatch.setitem(TASKS, train_and_extract.name, dataclasses.replace(train_and_extract, fn=lie))
    end = a.run(METHOD)[-1]
    monkeypatch.undo()
    (event,) = a.fed.failures
    assert event["client"] == "c1"
    assert re.search(reason, event["reason"])
    b.fed.sample = lambda: [k for k in CLIENTS if k != "c1"]
    assert digest(end) == digest(b.run(METHOD)[-1])  # as if it had not been there


def test_features_on_the_fly_that_do_not_fit_cost_the_seat_of_the_round(tmp_path):
    site = Site(tmp_path, fraction=0.6)
    state = site.run(METHOD)[-1]
    site.fed.begin(1)
    bad = site.fed.sample()[0]
    engine = Faulty(site.fed.engine, lambda c: "nan" if c.client == bad and "extract_features" in c.task else None)
    site.fed = Federation(engine, 0, FederationConfig(fraction=0.6))
    site.fed.begin(1)
    METHOD.round(state, site.fed, site.server)
    assert [f["client"] for f in site.fed.failures] == [bad]
    assert site.fed.down["train_and_extract"].messages == 2


def test_too_few_usable_replies_make_the_round_void(tmp_path):
    site = Site(tmp_path)
    site.fed.config = dataclasses.replace(site.fed.config, min_replies=5)
    site.server.num_classes = 3  # so that every reply is wrong
    with pytest.raises(QuorumNotMet, match=r"0 of 5 clients gave a valid reply to train_and_extract.*logits"):
        site.run(METHOD)


def test_a_client_whose_training_blows_up_keeps_its_model(tmp_path):
    site = Site(tmp_path)
    state = site.run(METHOD)[-1]
    before = {k: site.model(k) for k in CLIENTS}
    site.fed.begin(1)
    wild = dataclasses.replace(METHOD, local=dataclasses.replace(LOCAL, lr=1e6))
    with pytest.raises(QuorumNotMet, match=r"training diverged|not finite"):
        wild.round(state, site.fed, site.server)
    assert all(same_bits(before[k], site.model(k)) for k in CLIENTS)


def test_a_model_whose_features_are_not_finite_is_not_kept(tmp_path):
    site = Site(tmp_path)
    huge = {n: t.sign() * 3e38 if n.startswith("adapter") else t for n, t in site.server.init("m").items()}
    how = {"alpha": 1.0, "temperature": 3.0, "layer": "adapter", "teacher": torch.empty(0, C), **rows(12)}
    with pytest.raises(Diverged, match="predictions that are not finite"):
        train_and_extract(site.client("c1", 0, {"model": huge}), local=Local(epochs=0), **how)


def test_a_tower_that_blows_up_is_dropped(tmp_path):
    site = Site(tmp_path)
    wild = dataclasses.replace(METHOD, server=Local(epochs=3, batch=8, lr=1e9))
    start, end = site.run(wild)
    assert digest(start) == digest(end)
    assert site.events("server_diverged")


def test_logits_of_another_number_of_samples_are_refused_by_the_client(tmp_path):
    how = {"local": LOCAL, "alpha": 1.0, "temperature": 3.0, "layer": "adapter", **rows(12)}
    with pytest.raises(Exception, match="c1 has 12 samples and was sent the logits of 11"):
        train_and_extract(Site(tmp_path).client("c1", 0, {}), teacher=torch.zeros(11, C), **how)


# ---- what is measured -------------------------------------------------------------------------------


def test_the_score_is_that_of_extractor_and_tower(tmp_path):
    site = Site(tmp_path)
    state = site.run(METHOD, 2)[-1]
    client = site.client("c3", 0, {"model": site.model("c3")})
    model = site.server.model("m", site.model("c3"))
    top = tower((H,), C, 16, 2)
    top.load_state_dict(state.weights)
    whole = torch.nn.Sequential(model.body, model.adapter, top)
    x, y = client.test.inputs, client.test.labels
    assert score_with_tower(client, **METHOD.personal(state, site.fed).payload) == evaluate(whole, x, y)
    alone = dataclasses.replace(METHOD, judged="alone").personal(state, site.fed).payload
    assert score_with_tower(client, **alone) == evaluate(model, x, y)
    assert METHOD.models(state) == {}
    empty = dataclasses.replace(client, test=Data(x[:0], y[:0]))
    assert score_with_tower(empty, **METHOD.personal(state, site.fed).payload).total == 0


def test_it_learns(tmp_path):
    method = FedGKT(
        Local(epochs=2, batch=8, lr=0.01, optimizer="adam"),
        Local(epochs=4, batch=32, lr=0.01, optimizer="adam"),
        server_hidden=32,
        server_layers=1,
    )
    together = run_toy(method, tmp_path / "a", rounds=4).summary["personal"]["mean"]
    assert together > 0.85  # chance is a third


# ---- settings ---------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_paper():
    m = FedGKT()
    assert (m.temperature, m.alpha, m.local.epochs, m.server.epochs) == (3.0, 1.0, 1, 20)
    assert (m.local.optimizer, m.local.lr, m.local.batch) == ("adam", 1e-3, 256)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"alpha": -1.0}, "alpha = -1.0"),
        ({"server_hidden": 0}, "server_hidden = 0"),
        ({"server_layers": -1}, "server_layers"),
        ({"server_rounds": [5]}, "one for each"),
        ({"server_rounds": [5, 3], "server_epochs": [2, 1]}, r"server_rounds = \[5, 3\]: they must rise"),
        ({"server_rounds": [5], "server_epochs": [-2]}, "server_epochs"),
        ({"server": Local(steps=4)}, r"server_rounds = \[\]"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, why):
    with pytest.raises(ConfigError, match=why):
        FedGKT(**settings)


def test_scenarios_it_cannot_work_in_are_refused_before_any_work(tmp_path):
    site = Site(tmp_path)
    with pytest.raises(ConfigError, match=r"\(24,\) in 'c', \(16,\) in 'm'.*models\.head = 'shared'"):
        check_server(FedGKT(features="body"), site.server)
    with pytest.raises(ConfigError, match=r"'body\.conv9' is no layer of 'c'; it has, for example"):
        check_server(FedGKT(features="body.conv9"), site.server)
    rows = Site(tmp_path / "rows", builders={"c": Sequence, "m": Sequence})
    (found,) = FedGKT(features="sequence").fits(rows.server)
    assert re.search(r"features = 'sequence' in 'c': features are vectors or maps.*\(8, 8\)", found)
    assert feature_shape("fedgkt", "adapter", site.server) == (H,)
    site.server.shape = None
    with pytest.raises(ConfigError, match="shape of an input"):
        check_server(FedGKT(), site.server)
    with pytest.raises(ConfigError, match="plain Sequential"):
        run_toy(FedGKT(), tmp_path / "x", models={"wide": wide})


def test_the_tower_s_start_depends_on_the_seed_alone(tmp_path):
    a = FedGKT().init(Site(tmp_path / "a").fed, Site(tmp_path / "a").server)
    torch.manual_seed(99)
    b = FedGKT(alpha=0.1).init(Site(tmp_path / "b").fed, Site(tmp_path / "b").server)
    c = FedGKT().init(Site(tmp_path / "c", seed=1).fed, Site(tmp_path / "c", seed=1).server)
    assert same_bits(a.weights, b.weights)
    assert not same_bits(a.weights, c.weights)


def test_contract_of_cached_features(tmp_path):
    check_method(FedGKT(partial="cached", server_hidden=16, server_layers=1), tmp_path, engines=())


# ---- Fed-ET's Table 5: its server model, scored on the common test set ----------------------------------------


def test_the_tower_can_be_fed_ets_server_model():
    count = lambda m: sum(p.numel() for p in m.parameters())  # noqa: E731
    top = tower((16, 32, 32), 10, 1, 1, "vgg19")
    assert count(top) == 20_029_514 + 9 * 13 * 64  # the VGG-19 of the zoo, with 16 input channels instead of 3
    assert top(torch.zeros(2, 16, 32, 32)).shape == (2, 10)
    with pytest.raises(ValueError, match="takes feature maps"):
        tower((8,), 10, 1, 1, "vgg19")


def test_a_vgg_on_vectors_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="server_model = 'vgg19' takes feature maps"):
        Site(tmp_path).run(dataclasses.replace(METHOD, server_model="vgg19"), 1)
