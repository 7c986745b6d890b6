"""Fed-ET: Algorithm 1 by hand, who counts how often, the head's two ways, and calm when things go wrong."""

import dataclasses
import itertools
import json
import math

import pytest
import torch

import by_hand
from solera.core.errors import ConfigError
from solera.core.federation import FederationConfig, QuorumNotMet, draw_clients
from solera.core.task import Data
from solera.core.wire import digest
from solera.data import PartitionConfig, PublicConfig, from_tensors
from solera.method import Traits
from solera.methods.fedet import ConsensusTeacher, FedET
from solera.methods.steps.screen import Robust, Screen
from solera.methods.steps.training import head_of
from solera.models import as_split, build, wrap
from solera.models.factory import ModelsConfig
from solera.runs.config import EngineConfig, RunConfig
from solera.runs.loop import check_server, simulate
from solera.scenario.scenario import Scenario
from solera.testing import check_method, large, run_toy, small, split_deep, split_wide, toy, wide
from solera.train.distill import Distill
from solera.train.fitting import Local
from toys import Conv, World, images, mlp, same_bits, spoil

LOCAL = Local(steps=6, batch=8, lr=0.05)
FUSION = Distill(steps=7, batch=16, optimizer="sgd", lr=0.05, schedule="constant", clip=None)
FEDET = FedET(LOCAL, FUSION)
SIZES, KINDS = (5, 12, 9, 20, 7), "cmcmc"
BUILDERS = {
    "c": lambda: wrap(Conv(0), "8", representation=8, head_hidden=8),
    "m": lambda: wrap(mlp(1), "3", representation=8, head_hidden=8),
    "large": lambda: wrap(mlp(2, width=64), "3", representation=8, head_hidden=8),
}


def world(tmp, order=range(5), **options) -> World:
    """Five clients of different sizes, two architectures (one with BatchNorm), a larger model on the server."""
    parties = [(KINDS[i], Data(*images(SIZES[i], SIZES[i]))) for i in order]
    made = World(tmp, BUILDERS, parties, **{"public": images(40, seed=9)[0], "large": "large", **options})
    made.server.architectures.remove("large")
    return made


def uploads(w: World, state, clients=None):
    """The clients' models after their local training, by hand."""
    models = {}
    for k, seed in zip(w.fed.clients if clients is None else clients, w.seeds, strict=False):
        models[k] = w.server.model(w.fed.architecture(k), state.small[w.fed.architecture(k)])
        by_hand.train(models[k], w.data[k].inputs, w.data[k].labels, steps=6, batch=8, lr=0.05, seed=seed)
    return models


def server_by_hand(w: World, state, models, copies, diversity=FEDET.diversity, normalise=False):
    """The server's model after its steps of SGD on the ensemble loss."""
    x = images(40, seed=9)[0]
    student = w.server.model("large", state.large.weights | head_of(by_hand.mean_of(heads_of(models), copies)))
    w.fed.begin(0)
    hands = by_hand.batches(40, 7, 16, w.fed.seed("fusion"))
    loss = by_hand.consensus_loss(list(models.values()), x, copies, diversity, normalise)
    by_hand.teach(student, x, loss, hands, optimizer="sgd", lr=0.05)
    return student.state_dict()


def heads_of(models) -> list[torch.nn.Module]:
    """The models with nothing in them but their heads, under the same names."""
    return [torch.nn.ModuleDict({"head": m.head}) for m in models.values()]


# ---- the algorithm ---------------------------------------------------------------------------------


def test_a_round_is_algorithm_1(tmp_path):
    w = world(tmp_path)
    start, end = w.run(FEDET)
    models = uploads(w, start)
    expected = server_by_hand(w, start, models, [1] * 5)
    assert by_hand.close(end.large.weights, expected)
    assert not by_hand.close(end.large.weights, start.large.weights | head_of(end.large.weights))
    for i in "cm":
        mean = by_hand.mean_of([m for k, m in models.items() if w.fed.architecture(k) == i])
        assert by_hand.close(end.small[i], mean | head_of(expected))


def test_all_heads_are_the_servers_before_and_after_every_round(tmp_path):
    w = world(tmp_path, fraction=0.4)
    states = w.run(FEDET, 3)
    for state in states:
        for weights in state.small.values():
            assert same_bits(head_of(weights), head_of(state.large.weights))
    assert not same_bits(head_of(states[0].large.weights), head_of(states[1].large.weights))


def test_an_architecture_without_a_client_keeps_its_body_and_gets_the_head(tmp_path):
    w = world(tmp_path)
    w.fed.sample = lambda: ["c1", "c3"]
    start, end = w.run(FEDET)
    body = {n: t for n, t in start.small["c"].items() if not n.startswith("head.")}
    assert same_bits(end.small["c"], start.small["c"] | head_of(end.large.weights))
    assert all(torch.equal(end.small["c"][n], t) for n, t in body.items())
    assert not same_bits(head_of(start.small["c"]), head_of(end.small["c"]))


@pytest.mark.parametrize("target", ["raw", "normalised"])
def test_the_target_of_the_diversity_term(tmp_path, target):
    w = world(tmp_path)
    start, end = w.run(dataclasses.replace(FEDET, diversity=2.0, div_target=target))
    models = uploads(w, start)
    expected = server_by_hand(w, start, models, [1] * 5, 2.0, target == "normalised")
    assert by_hand.close(end.large.weights, expected)
    other = server_by_hand(w, start, models, [1] * 5, 2.0, target != "normalised")
    assert not by_hand.close(end.large.weights, other)


def test_the_diversity_term_is_a_mean_over_the_batch(tmp_path):
    """Eq. 10 has it inside the mean: as a sum it would weigh as much more as there are samples in a batch."""
    w = world(tmp_path)
    start, end = w.run(dataclasses.replace(FEDET, diversity=0.5))
    models = uploads(w, start)
    assert by_hand.close(end.large.weights, server_by_hand(w, start, models, [1] * 5, 0.5))
    summed = server_by_hand(w, start, models, [1] * 5, 0.5 * FUSION.batch)
    assert not by_hand.close(end.large.weights, summed)


def test_without_diversity_it_is_plain_consensus(tmp_path):
    w = world(tmp_path / "a")
    start, end = w.run(dataclasses.replace(FEDET, diversity=0.0))
    assert by_hand.close(end.large.weights, server_by_hand(w, start, uploads(w, start), [1] * 5, 0.0))
    assert digest(world(tmp_path / "b").run(FEDET)[-1]) != digest(end)


def test_diversity_changes_nothing_where_no_teacher_dissents(tmp_path):
    def ends(tmp, diversity):
        w = world(tmp)
        w.fed.sample = lambda: ["c3"]  # a single teacher agrees with itself
        end = w.run(dataclasses.replace(FEDET, diversity=diversity))[-1]
        return end, w.events("distilled")[0]

    a, event = ends(tmp_path / "a", 0.0)
    b, _ = ends(tmp_path / "b", 0.5)
    assert event["dissent"] == 0
    torch.testing.assert_close(a.large.weights, b.large.weights, rtol=0, atol=1e-7)


def test_the_order_of_the_clients_does_not_matter(tmp_path):
    """Five clients that are numbered otherwise, and each still trained with its own seed."""
    order = [3, 0, 4, 2, 1]
    still = dataclasses.replace(FEDET, local=Local(steps=3, batch=64, lr=0.05))  # whole data sets: no draw matters
    a = world(tmp_path / "a").run(still, 2)[-1]
    b = world(tmp_path / "b", order).run(still, 2)[-1]
    torch.testing.assert_close(a.large.weights, b.large.weights, rtol=0, atol=1e-6)
    for i in "cm":
        torch.testing.assert_close(a.small[i], b.small[i], rtol=0, atol=1e-6)


# ---- who is drawn, and how often -------------------------------------------------------------------


def test_fet_7_sampling_in_proportion_to_size():
    n, g, draws = torch.tensor([4, 3, 2, 1]), torch.Generator().manual_seed(0), 20_000
    p = (n.double() / n.sum()).tolist()
    inclusion = [0.0] * 4
    for i, j in itertools.permutations(range(4), 2):
        for k in (i, j):
            inclusion[k] += p[i] * p[j] / (1 - p[i])
    assert inclusion == pytest.approx([0.71587302, 0.60833333, 0.44126984, 0.23452381], abs=5e-9)
    drawn = torch.stack([draw_clients(n, 2, g, "size") for _ in range(draws)])
    assert (drawn[:, 0] != drawn[:, 1]).all()
    assert (drawn.flatten().bincount(minlength=4) / draws).tolist() == pytest.approx(inclusion, abs=0.015)

    again = torch.stack([draw_clients(n, 2, g, "size", replacement=True) for _ in range(draws)])
    assert (again.flatten().bincount(minlength=4) / draws).tolist() == pytest.approx([0.8, 0.6, 0.4, 0.2], abs=0.015)
    once = [(again == k).any(1).double().mean().item() for k in range(4)]
    assert once == pytest.approx([0.64, 0.51, 0.36, 0.19], abs=0.015)


def test_a_client_drawn_twice_counts_twice_everywhere(tmp_path):
    w = world(tmp_path)
    config = FederationConfig(sampling="size", replacement=True, fraction=1.0)
    w.fed.config = config
    start, end = w.run(FEDET)
    w.fed.begin(0)
    S = w.fed.sample()
    copies = [w.fed.copies[k] for k in S]
    assert max(copies) > 1
    models = uploads(w, start, S)
    expected = server_by_hand(w, start, models, copies)  # steps 3 and 4
    assert by_hand.close(end.large.weights, expected)
    assert not by_hand.close(end.large.weights, server_by_hand(w, start, models, [1] * len(S)))
    for i in {w.fed.architecture(k) for k in S}:
        mine = [(models[k], n) for k, n in zip(S, copies, strict=True) if w.fed.architecture(k) == i]
        mean = by_hand.mean_of([m for m, _ in mine], [n for _, n in mine])  # step 6
        assert by_hand.close(end.small[i], mean | head_of(expected))


def test_models_are_designated_once_and_at_random():
    a, b = (toy(assign="random", clients=30, seed=s, samples=900) for s in (0, 1))
    kinds = [[t.roster[t.roster.id(i)].architecture for i in range(30)] for t in (a, b)]
    assert kinds[0] != kinds[1]
    assert set(kinds[0]) == {"wide", "deep"}
    assert kinds[0] == [a.roster[a.roster.id(i)].architecture for i in range(30)]


def test_fet_5_size_of_the_shared_head():
    for classes, u in ((10, 17_802), (100, 29_412), (2, 16_770)):
        for body, width in ((torch.nn.Linear(4, 50), 50), (torch.nn.Linear(4, 512), 512)):
            assert sum(p.numel() for p in as_split(body, width, classes).head.parameters()) == u
    assert sum(p.numel() for p in build("lenet5", 10, (1, 28, 28), head="shared").head.parameters()) == 17_802


# ---- public samples --------------------------------------------------------------------------------


def test_teachers_are_asked_about_the_very_view_the_student_sees(tmp_path):
    """Samples transformed at each draw: nothing is stored, and other draws train another model."""
    w = world(tmp_path / "a")
    seen = []

    class Fresh(type(w.server.public)):
        fresh = True

        def draw(self, indices, seed):
            seen.append(self[indices] + 0.3 * torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(seed)))
            return seen[-1]

    w.server.public = Fresh(images(40, seed=9)[0])
    asked = []
    call = ConsensusTeacher.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConsensusTeacher, "__call__", lambda self, x: asked.append(x) or call(self, x))
        end = w.run(FEDET)[-1]
    assert len(asked) == len(seen) == FUSION.steps
    assert all(a is b for a, b in zip(asked, seen, strict=True))
    assert digest(end) != digest(world(tmp_path / "b").run(FEDET)[-1])


def test_a_static_view_is_asked_about_once(tmp_path):
    asked = []
    call = ConsensusTeacher.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConsensusTeacher, "__call__", lambda self, x: asked.append(len(x)) or call(self, x))
        world(tmp_path).run(FEDET)
    assert asked == [40]


def test_answers_on_disk_give_the_same_bits_and_halves_keep_the_labels(tmp_path):
    def run(**kept):
        w = world(tmp_path / str(kept))
        end = w.run(dataclasses.replace(FEDET, fusion=dataclasses.replace(FUSION, **kept)))[-1]
        return digest(end), w.events("distilled")[0]["dissent"], end

    memory, disk, half = run(), run(cache_on_disk=True), run(cache_dtype="float16")
    assert memory[:2] == disk[:2]
    assert half[0] != memory[0]  # the dissent is rounded
    assert half[1] == pytest.approx(memory[1], rel=2**-11)
    by_label = [
        world(tmp_path / f"l{kept}").run(FedET(LOCAL, dataclasses.replace(FUSION, cache_dtype=kept), diversity=0.0))[-1]
        for kept in ("float32", "float16")
    ]
    assert digest(by_label[0]) == digest(by_label[1])


@pytest.mark.parametrize("fresh", [False, True])
def test_transformed_public_images_run(tmp_path, fresh):
    x, y = images(300)
    x = (x.clamp(-4, 4) * 30 + 127).to(torch.uint8)
    data = from_tensors((x[:200], y[:200]), (x[200:], y[200:]), classes=4)
    models = {k: BUILDERS[k] for k in "cm"}
    public, parts = (
        PublicConfig(size=40, augment=["crop", "flip", "jitter", "gray"], fresh=fresh),
        PartitionConfig("iid", clients=4),
    )
    scenario = Scenario(
        data, ModelsConfig(clients=list(models), server="large"), parts, public,
        modules={**models, "large": BUILDERS["large"]},
    )  # fmt: skip
    result = simulate(scenario, FEDET, tmp_path, RunConfig(rounds=1), engine=EngineConfig("inprocess"))
    assert set(result.models) == {"large", "c", "m"}


def test_only_the_samples_of_the_round_are_used(tmp_path):
    w = world(tmp_path, per_round=10)
    asked = []
    call = ConsensusTeacher.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConsensusTeacher, "__call__", lambda self, x: asked.append(len(x)) or call(self, x))
        w.run(FEDET)
    assert asked == [10]


# ---- when things go wrong --------------------------------------------------------------------------


def test_a_teacher_without_finite_answers_leaves_every_sum(tmp_path):
    w = world(tmp_path / "b")
    spoil(w, "c1")
    rejected = w.run(FEDET)[-1]
    assert [e["client"] for e in w.fed.failures] == ["c1"]

    w = world(tmp_path / "c")
    w.fed.sample = lambda: ["c0", "c2", "c3", "c4"]
    assert digest(w.run(FEDET)[-1]) == digest(rejected)


def test_a_round_without_a_usable_upload_changes_nothing(tmp_path):
    w = world(tmp_path)
    start = FEDET.init(w.fed, w.server)
    spoil(w, *w.fed.clients)
    with pytest.raises(QuorumNotMet, match=r"0 of 5 clients .*non-finite logits on public samples"):
        w.run(FEDET, state=start)
    assert len(w.fed.failures) == 5


@pytest.mark.parametrize("average", ["median", "trimmed_mean", "multi_krum"])
def test_a_robust_average_keeps_one_byzantine_client_out_of_the_heads(tmp_path, average):
    def end(tmp, screen):
        w = world(tmp)
        task = w.fed.map

        def lie(*args, **payload):
            replies = task(*args, **payload)
            replies["c3"].weights["head.2.bias"].add_(1e4)
            return replies

        w.fed.map = lie
        return w.run(dataclasses.replace(FEDET, screen=screen))[-1]

    assert end(tmp_path / "a", Screen("uniform")).large.weights["head.2.bias"].abs().max() > 1000
    assert end(tmp_path / "b", Robust(average)).large.weights["head.2.bias"].abs().max() < 10


def test_a_server_model_that_blows_up_falls_back_to_where_it_started(tmp_path):
    w = world(tmp_path)
    start, end = w.run(dataclasses.replace(FEDET, fusion=dataclasses.replace(FUSION, lr=1e30)))
    assert len(w.events("distill_diverged")) == 1
    mean = by_hand.mean_of(heads_of(uploads(w, start)))
    assert by_hand.close(end.large.weights, start.large.weights | mean)


def test_no_server_steps_still_pass_the_head(tmp_path):
    w = world(tmp_path)
    start, end = w.run(dataclasses.replace(FEDET, fusion=dataclasses.replace(FUSION, steps=0)))
    mean = by_hand.mean_of(heads_of(uploads(w, start)))
    assert by_hand.close(end.large.weights, start.large.weights | mean)
    assert by_hand.close(head_of(end.small["c"]), mean)


def test_more_workers_give_the_same_bits(tmp_path):
    a = world(tmp_path / "a").run(FEDET, 2)[-1]
    b = world(tmp_path / "b", workers=2).run(FEDET, 2)[-1]
    assert digest(a) == digest(b)


# ---- what is refused, and what is reported ---------------------------------------------------------


def test_unsplit_models_are_refused_with_the_way_out(tmp_path):
    with pytest.raises(
        ConfigError, match=r"'wide' is a plain Sequential.*solera\.models\.wrap\(model, classifier='2'\)"
    ):
        run_toy(FedET(), tmp_path, models={"wide": wide, "deep": split_deep})
    with pytest.raises(ConfigError, match=r"'large' is a plain Sequential"):
        run_toy(FedET(), tmp_path, server=("large", wide))


def test_heads_of_different_shape_are_refused(tmp_path):
    other = wrap(wide(), "2", representation=8, head_hidden=16)
    with pytest.raises(
        ConfigError, match=r"head of 'wide'.*'odd'.*models\.head = 'shared'|head of 'odd'.*models\.head"
    ):
        run_toy(FedET(), tmp_path, models={"wide": split_wide, "odd": other})


def test_a_missing_or_common_server_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'fedet' trains a model of the server's own.*models\.server"):
        run_toy(FedET(), tmp_path, server=None)
    with pytest.raises(ConfigError, match=r"models\.server = 'wide'.*larger"):
        run_toy(FedET(), tmp_path, server=("wide", large))
    with pytest.raises(ConfigError, match="public"):
        run_toy(FedET(), tmp_path, public=PublicConfig(source="none"))
    w = world(tmp_path, large=None)
    with pytest.raises(ConfigError, match=r"models\.server"):
        check_server(FEDET, w.server)


@pytest.mark.parametrize(
    "bad",
    [
        {"diversity": -0.1},
        {"local": Local(epochs=3, steps=30)},
        {"diversity": float("nan")},
        {"fusion": Distill(temperature=2.0)},
        {"fusion": Distill(t_squared=True)},
        {"fusion": Distill(keep_init_if_better=True)},
    ],
)
def test_settings_without_a_meaning_are_refused(bad):
    with pytest.raises(ConfigError, match=r"(?i)fedet"):
        FedET(**bad)


def test_the_papers_settings_are_the_defaults():
    method = FedET()
    assert (method.local.steps, method.local.batch, method.local.lr) == (30, 64, 0.1)
    fusion = method.fusion
    assert (fusion.steps, fusion.batch, fusion.lr, fusion.momentum) == (128, 64, 0.005, 0.0)
    assert (fusion.optimizer, fusion.schedule, fusion.clip) == ("sgd", "constant", None)
    assert (method.diversity, method.div_target) == (0.05, "raw")


def test_the_server_model_the_architectures_and_the_consensus_are_reported(tmp_path):
    result = run_toy(small(FedET(report_ensemble=True)), tmp_path)
    assert list(result.models) == ["large", "deep", "wide"]
    assert set(result.summary["models"]) == {"large", "deep", "wide"}
    assert set(result.summary["ensembles"]) == {"teachers"}
    assert result.models["large"].architecture == "large"


def test_each_client_gets_and_sends_its_own_model_and_nothing_of_the_servers(tmp_path):
    w = world(tmp_path)
    end = w.run(FEDET)[-1]
    size = {i: sum(t.numel() for t in end.small[i].values() if t.is_floating_point()) for i in "cm"}
    total = sum(size[i] for i in KINDS)
    assert sum(t.floats for t in w.fed.up.values()) == total
    assert sum(t.floats for t in w.fed.down.values()) == total


def test_it_learns_on_the_toy_federation(tmp_path):
    method = FedET(Local(steps=20, batch=16, lr=0.1), dataclasses.replace(FUSION, steps=60, lr=0.1))
    result = run_toy(method, tmp_path, rounds=8)
    assert result.summary["models"]["large"]["accuracy"] > 0.85


def test_contract(tmp_path):
    check_method(FedET(diversity=0.5, div_target="normalised", report_ensemble=True), tmp_path, engines=["processes"])


def test_a_method_can_need_only_what_is_known():
    with pytest.raises(ValueError, match=r"split = \"a miracle\".*'shared head'"):
        Traits(split="a miracle")
    assert (FedET().traits().split, FedET().traits().server_model) == ("shared head", "larger")


# ---- another equation ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Last(FedET):
    """Only the last teacher counts."""

    def weights(self, probs, copies):
        return torch.eye(len(probs), dtype=probs.dtype)[-1][:, None].expand(probs.shape[:2])


def test_the_ensemble_that_is_measured_is_the_one_that_teaches(tmp_path):
    """The last client's model alone: its accuracy is that of the ensemble."""
    state, seen = run_toy(Last(LOCAL, Distill(steps=1)), tmp_path / "a", rounds=1), []
    plain = run_toy(FedET(LOCAL, Distill(steps=1)), tmp_path / "b", rounds=1)
    assert state.summary["ensembles"]["teachers"] != plain.summary["ensembles"]["teachers"]
    for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines():
        seen += [e for e in json.loads(line)["events"] if e["kind"] == "teachers"]
    assert seen[0]["confidence"][-1] == 1.0
    assert set(seen[0]["confidence"][:-1]) == {0.0}
    assert seen[0]["agrees"][-1] == 1.0


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (lambda self, probs, copies: probs.mean(-1).T, r"returned \(\d+, \d+\): a tensor \[teachers, samples\]"),
        (lambda self, probs, copies: None, "returned NoneType"),
        (lambda self, probs, copies: torch.ones(probs.shape[:2]), "must sum to 1 for each sample, and they sum to"),
        (lambda self, probs, copies: torch.full(probs.shape[:2], math.nan), "they sum to nan"),
    ],
)
def test_weights_that_are_none_are_refused(tmp_path, monkeypatch, weights, says):
    monkeypatch.setattr(Last, "weights", weights)
    with pytest.raises(ConfigError, match=says):
        run_toy(Last(LOCAL, Distill(steps=1)), tmp_path, rounds=1)
