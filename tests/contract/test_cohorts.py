"""Who takes part in a round, for every method: clients drawn twice, absent, without examples, in another order; and a
validation set, which few papers have.

Each test compares two federations that mean the same, or the state before and after a round that must not touch it.
What a method does otherwise, and why, is in a table here. A new method is picked up by being registered.
"""

import dataclasses
from typing import Any

import pytest

import solera.methods  # noqa: F401  (registers them)
from cohorts import HELD_OUT, PARTIES, SCAFFOLD, UNIFORM, WEIGHTED, Federated, apart, settings
from solera.core.wire import digest
from solera.method import METHODS
from solera.methods.fedftg import FineTune
from solera.methods.framework.global_trainers import Codistilling
from solera.methods.steps.screen import Robust, Screen
from solera.methods.steps.teaching import ByAccuracy, Swag
from solera.train.similarity import Coefficients

ROUNDING = 3e-5
EVERYBODY = ["c0", "c1", "c2", "c3", "c4"]
ONE_GROUP = {name: {"K": 1} for name in ("framework", "fedeed", "fedensemble", "codistillation")}
STILL = {  # what would otherwise depend on a client's seed or place
    **ONE_GROUP,
    "codistillation": {"K": 1, "global_trainer": Codistilling(warmup=1)},
    "fedgen": {"generated_weight": 0.0},  # latents are drawn with the client's seed
    "fedftg": {"tune": FineTune(steps=2, generator_steps=0, student_lr=0.05)},  # a generator step for each client
    "hierarchical": {"grouping": "blocks"},
    "heterofl": {"rates": [1.0, 0.5, 1.0, 1.0]},  # c4 and its twin have the same
    "fedgkt": {"server_rounds": [], "server_epochs": [], "server_hidden": 16, "server_layers": 1},
    "mnflparam": {"coefficients": Coefficients(lr=0.1)},
    **{name: {"coefficients": Coefficients(lr=0.1)} for name in ("mnfl", "mnfl-code", "mnfl-twice")},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, STILL.get(name, {})) for name in sorted(METHODS)} | {
    "strata": ("framework", {"K": 2, "schedule": "strata"}),
    "framework, clients teach": ("framework", WEIGHTED),
    "framework, uniform": ("framework", UNIFORM),
    "framework, scaffold": ("framework", SCAFFOLD),
    "fedavg, uniform": ("fedavg", {"average": "uniform"}),
    "feddf, uniform": ("feddf", {"screen": Screen("uniform")}),
    "feddf, median": ("feddf", {"screen": Robust("median"), "ensemble": "median_probs"}),
    "feddf, accuracy": ("feddf", {"teaching": ByAccuracy()}),
    "feddf, swag": ("feddf", {"teaching": Swag(samples=2)}),
    "hierarchical, logits": ("hierarchical", {"grouping": "blocks", "exchange": "logits"}),
    "hierarchical, every 2": ("hierarchical", {"grouping": "blocks", "screen": Screen("uniform"), "every": 2}),
    "fedgkt, cached": ("fedgkt", {**STILL["fedgkt"], "partial": "cached"}),
    "fusionlarge, shared head": ("fusionlarge", {"head": "shared"}),
    "fedma, weighted": ("fedma", {"average": "weighted", "class_weighted": False}),
    "heterofl, weighted": ("heterofl", {"average": "weighted", **STILL["heterofl"]}),
    "fedgen, own heads": ("fedgen", {"share_head": False, **STILL["fedgen"]}),
    "fedgems, all": ("fedgems", {"selective": False}),
    "mnflparam, sim": ("mnflparam", {"rule": "sim"}),
    "scaffold, option I": ("scaffold", {"option": "I"}),
    "dsfl, logits": ("dsfl", {"era_input": "logits"}),
}
NO_COHORT = {"centralised"}  # trains on all data: nobody is drawn
OF_ONE_KIND = {"feddf, swag"}
BY_VALIDATION = "feddf, accuracy"  # needs a validation set
CLIENTS_TEACH = ("framework, clients teach", "framework, uniform")


def variants(*but: str) -> list[str]:
    """All but these, by the name of the method or of the variant."""
    out = {*but, *NO_COHORT}
    return [v for v in VARIANTS if v not in out and VARIANTS[v][0] not in out]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A federation after two rounds; the same one is played once."""
    done: dict[Any, Federated] = {}

    def play(variant: str, parties=(), drawn=(), rounds: int = 2, **options: Any) -> Federated:
        key = variant, tuple(parties), str(drawn), rounds, *options
        if key not in done:
            done[key] = federation(tmp_path_factory.mktemp("federation"), variant, parties, **options)
            done[key].play(rounds, *drawn)
        return done[key]

    return play


def federation(tmp: Any, variant: str, parties=(), **options: Any) -> Federated:
    name, changed = VARIANTS[variant]
    kinds = [("w", n) for _, n in parties or PARTIES] if variant in OF_ONE_KIND else parties or PARTIES
    held_out = {"validation": HELD_OUT} if variant == BY_VALIDATION else {}
    return Federated(tmp, settings(name, **changed), kinds, **(held_out | options))


def same(a: Federated, b: Federated) -> bool:
    """Whether two federations have the same models, but for rounding; clients without examples do not count."""
    own = {n: weights for n, weights in b.own_models().items() if n}
    return max(apart(a.models(), b.models()), apart(a.own_models(), own)) < ROUNDING


def voices(a: Federated) -> list[float]:
    """How much all members of each ensemble that was reported count together."""
    return [float(sum(e.weights or [1.0] * len(e.members))) for e in a.server.ensembles]


# ---- drawn twice -----------------------------------------------------------------------------------

# A client of these learns from each other client as itself, however often that one was drawn.
ONCE = ("local", "mnfl", "mnfl-code", "mnfl-twice", "mnflparam", "simpfl", "topkpfl", "fedamp", "fedfomo")
# A variate, an embedding, a table and a stratum of one's own are there once, so a twin is something else: tests of
# their own.
OTHERWISE = ("scaffold", "scaffold-up", "framework, scaffold", "pfedhn", "fd", "strata")


@pytest.mark.parametrize("variant", variants(*ONCE, *OTHERWISE))
def test_a_client_drawn_twice_counts_as_two_clients_with_the_same_samples(variant, played):
    """Cohorts are multisets: c4 twice is c4 and a twin beside it."""
    two = played(variant, drawn=[[*EVERYBODY, "c4"]] * 2)
    twin = played(variant, [*PARTIES, PARTIES[4]], drawn=[[*EVERYBODY, "c5"]] * 2)
    assert same(two, twin)
    assert not same(two, played(variant))
    assert voices(two) == pytest.approx(voices(twin))  # what is measured is what teaches


@pytest.mark.parametrize("variant", [v for v in variants() if VARIANTS[v][0] in ONCE])
def test_a_client_of_a_personal_method_counts_once_however_often_it_is_drawn(variant, played):
    two, once = played(variant, drawn=[[*EVERYBODY, "c4"]] * 2), played(variant)
    assert digest(two.states[-1]) == digest(once.states[-1])
    assert apart(two.own_models(), once.own_models()) == 0


# ---- failed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", variants())
def test_a_client_that_fails_is_as_if_it_had_not_been_drawn(variant, played, tmp_path):
    a = federation(tmp_path, variant)
    a.data["c4"] = None
    a.play(1, EVERYBODY)
    assert {f["client"] for f in a.fed.failures} == {"c4"}
    assert same(a, played(variant, drawn=[["c0", "c1", "c2", "c3"]], rounds=1))


# ---- absent ----------------------------------------------------------------------------------------

EXISTS = {  # what the others notice of an architecture that is absent
    "mnfl": "N is that of all clients",
    "mnfl-code": "the same",
    "mnfl-twice": "the same",
    "mnflparam": "has one architecture",
    "pfedhn": "embeddings are drawn for all clients",
    "hierarchical": "groups are dealt to all clients",
    "fedfomo": "validation samples are drawn by the client's name",
    "fedgen": "the first architecture's head is everyone's first head",
    "framework": "the designated model is taught, and all global models teach",
    "fedeed": "the same",
    "codistillation": "all global models teach",
    "feddf, swag": "has one architecture",
}


@pytest.mark.parametrize("variant", [*variants(*EXISTS), *CLIENTS_TEACH])
def test_an_architecture_that_is_absent_does_not_exist_for_the_others(variant, played):
    """Two rounds of the clients of one architecture are those of a federation without the other one."""
    here = ["c0", "c3", "c4"]
    a, b = played(variant, drawn=[here] * 2), played(variant, [PARTIES[i] for i in (0, 3, 4)], [["c0", "c1", "c2"]] * 2)
    assert apart({name: a.models()[name] for name in b.models()}, b.models()) < ROUNDING
    assert apart(a.own_models(), b.own_models()) < ROUNDING


def entries(state: Any, keys: set[str]) -> dict[str, dict[str, Any]]:
    """The tables of a state with an entry for each of some clients or architectures."""
    tables = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    return {name: t for name, t in tables.items() if isinstance(t, dict) and t and set(t) <= keys}


def body(value: Any) -> Any:
    """Without the head, which some methods share with all architectures."""
    if isinstance(value, dict):
        return {n: body(v) for n, v in value.items() if not n.startswith("head.")}
    return value


CHANGES = {  # what happens to an architecture that is absent
    "hierarchical, every 2": "it is fused above, with what its groups found the round before",
    "framework": "the designated model is taught by the others",
    "fedeed": "the same",
}


@pytest.mark.parametrize("variant", [*variants(*CHANGES), *CLIENTS_TEACH])
def test_who_is_absent_stays_as_it_was(variant, tmp_path):
    """A round of all, one of some clients of one architecture, and one of all again: what is kept of and by the others
    is neither touched nor lost, and they go on with it."""
    a = federation(tmp_path, variant).play(0)
    before, kept = a.round(*EVERYBODY), dict(a.fed.ledger)
    after, gone = a.round("c0", "c3"), {"c1", "c2", "c4"}
    assert {k: v for k, v in a.fed.ledger.items() if k in gone} == {k: v for k, v in kept.items() if k in gone}
    for keys, absent in ((set(EVERYBODY), gone), ({"w", "d"}, {"d"})):
        for name, table in entries(before, keys).items():
            for key in absent & table.keys():
                assert digest(body(entries(after, keys)[name][key])) == digest(body(table[key])), (name, key)
    a.round(*EVERYBODY)


@pytest.mark.parametrize("variant", [v for v in variants("fedfomo") if VARIANTS[v][0] in ONCE])  # it is given others'
def test_a_newcomer_to_a_personal_method_starts_as_if_it_were_the_first(variant, tmp_path):
    """Whatever others have learned by then: it was not there, and they are not here."""
    a, b = federation(tmp_path / "a", variant).play(0), federation(tmp_path / "b", variant).play(0)
    a.round("c0", "c3")
    a.round("c4")
    b.round("c4")
    size = PARTIES[4][1]
    assert apart({size: a.own_models()[size]}, {size: b.own_models()[size]}) < ROUNDING


# ---- without examples, and in another order --------------------------------------------------------

# mnfl's N is that of all clients, and where all take part an empty one learns from the others.
EMPTY_COUNTS = ("mnfl", "mnfl-code", "mnfl-twice", "mnflparam", "simpfl", "topkpfl")
BY_PLACE = {  # what follows from a client's name or its place in the roster
    "hierarchical": "its group",
    "heterofl": "its rate",
    "pfedhn": "its embedding",
    "fedfomo": "its validation samples",
    "strata": "its stratum",
    "feddistill": "its part in a drawn model",
    "feddf, swag": "the same",
}


@pytest.mark.parametrize("variant", [*variants(*BY_PLACE)])
def test_neither_the_order_of_the_clients_nor_one_without_examples_matters(variant, played):
    empty = [] if VARIANTS[variant][0] in EMPTY_COUNTS else [("d", 0)]
    assert same(played(variant), played(variant, [PARTIES[3], PARTIES[0], *empty, *(PARTIES[i] for i in (4, 2, 1))]))


@pytest.mark.parametrize("variant", [v for v in variants("pfedhn") if v in BY_PLACE or VARIANTS[v][0] in BY_PLACE])
def test_a_client_without_examples_at_the_end_changes_nothing(variant, played):
    assert same(played(variant), played(variant, [*PARTIES, ("d", 0)]))


@pytest.mark.parametrize("variant", ["heterofl", "strata"])
def test_rates_and_strata_are_dealt_to_clients_with_examples(variant, played):
    assert same(played(variant), played(variant, [*PARTIES[:3], ("w", 0), *PARTIES[3:]]))


# ---- a validation set ------------------------------------------------------------------------------

# FedDF stops early by it; the others fuse as FedDF does, and the framework's global trainer can.
STOP_EARLY = ("feddf", "feddf-previous", "pfeddf", "hierarchical", "fusionlarge", "framework")


@pytest.mark.parametrize("variant", variants(BY_VALIDATION))
def test_only_methods_whose_papers_have_a_validation_set_look_at_it(variant, played):
    with_it = played(variant, rounds=1, validation=HELD_OUT)
    looks = VARIANTS[variant][0] in STOP_EARLY
    assert (digest(played(variant).states[1]) != digest(with_it.states[1])) == looks
