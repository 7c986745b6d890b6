"""Partitions: properties that hold for every kind, the special ones of each, and what is refused."""

import hashlib
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from solera.core.errors import ConfigError, DataError
from solera.core.wire import SAFE_NAME
from solera.data import Partition, PartitionConfig, class_counts, partition, split_test
from solera.data.partition import client_names, dirichlet

KINDS = [
    {"kind": "iid"},
    {"kind": "quantity"},
    {"kind": "classes"},
    {"kind": "user"},
    {"kind": "dirichlet", "variant": "block"},
    {"kind": "dirichlet", "variant": "equal"},
    {"kind": "dirichlet", "variant": "class"},
    {"kind": "dirichlet", "variant": "client"},
]


def ids(kinds):
    return "-".join(kinds.values())


def ten_classes(n=2000):
    return torch.arange(n) % 10


def make(labels, classes=10, seed=0, users=None, **options):
    if options.get("kind") == "user" and users is None:
        users = torch.arange(len(labels)) % 97
    return partition(PartitionConfig(**options), labels, classes, seed, users)


@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_every_sample_belongs_to_exactly_one_client(kind):
    labels = ten_classes()
    split = make(labels, clients=23, alpha=1.0, users=torch.arange(2000) % 23, **kind)
    assert len(split) == 23
    assert sorted(split.order.tolist()) == list(range(2000))
    mine = [split.indices(k) for k in range(23)]
    assert sorted(torch.cat(mine).tolist()) == list(range(2000))
    assert [len(m) for m in mine] == split.sizes.tolist()
    assert all(m.tolist() == sorted(m.tolist()) for m in mine)
    assert split.sizes.min() >= 1


@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_the_seed_decides_and_global_generators_are_left_alone(kind):
    labels = ten_classes()
    np.random.seed(1)
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    first, again, other = (make(labels, clients=20, alpha=0.5, seed=s, **kind) for s in (7, 7, 8))
    assert torch.equal(first.order, again.order)
    assert torch.equal(first.offsets, again.offsets)
    assert not torch.equal(first.order, other.order)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    clients=st.integers(1, 33),
    per_client=st.integers(3, 30),
    alpha=st.floats(0.05, 100),
    classes=st.integers(1, 12),
    seed=st.integers(0, 2**31),
)
def test_any_possible_request_gives_a_whole_partition_or_says_why_not(kind, clients, per_client, alpha, classes, seed):
    labels = torch.randint(0, classes, (clients * per_client,), generator=torch.Generator().manual_seed(seed))
    try:
        users = torch.arange(len(labels)) % clients
        split = make(labels, classes, seed, users, clients=clients, alpha=alpha, classes_per_client=1, **kind)
    except ConfigError as refusal:
        split, reason = None, str(refusal)
    if split is None:
        assert kind["kind"] in ("classes", "dirichlet")  # the others can always be done
        assert reason.startswith("partition.")
        return
    assert sorted(split.order.tolist()) == list(range(len(labels)))
    assert int(split.sizes.min()) >= 1
    assert int(class_counts(split, labels, classes).sum()) == len(labels)


@pytest.mark.parametrize("variant", ["block", "class", "client"])
def test_large_alpha_gives_every_client_the_class_mix_of_the_whole(variant):
    labels = ten_classes(20_000)
    counts = class_counts(make(labels, kind="dirichlet", variant=variant, clients=20, alpha=1e6), labels, 10)
    shares = counts / counts.sum(1, keepdim=True)
    # The block variant divides a random part of a shuffle; the client variant draws its classes at random, and the
    # last clients take what is left: both scatter a little.
    assert float((shares - 0.1).abs().mean()) < 0.015
    assert float((shares - 0.1).abs().max()) < {"block": 0.03, "class": 0.005, "client": 0.15}[variant]


@pytest.mark.parametrize("variant", ["block", "class", "client"])
def test_small_alpha_concentrates_classes(variant):
    labels = ten_classes(20_000)
    counts = class_counts(make(labels, kind="dirichlet", variant=variant, clients=10, alpha=0.05), labels, 10).double()
    largest_class = (counts.max(1).values / counts.sum(1)).mean()
    assert float(largest_class) > 0.5


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("clients", [7, 10, 20, 34])
def test_block_variant_keeps_its_bounds(alpha, clients):
    labels = ten_classes(6800)
    sizes = make(labels, kind="dirichlet", variant="block", clients=clients, alpha=alpha, seed=clients).sizes
    for block in range(0, clients, 10):
        mine = sizes[block : block + 10].double()
        assert float(mine.min()) >= 0.5 * float(mine.mean())
        # Samples are split over blocks in proportion to their clients.
        assert abs(float(mine.sum()) - 6800 * len(mine) / clients) <= 1


def test_block_variant_gives_nothing_more_to_a_client_with_its_share():
    # One class first: with alpha tiny, one client of ten takes it whole (100 samples = the fair share of 100), so it
    # must get nothing of the second class, and so on: every client ends with exactly one class.
    labels = torch.arange(10).repeat_interleave(100)
    counts = class_counts(make(labels, kind="dirichlet", clients=10, alpha=1e-9), labels, 10)
    assert counts.max(1).values.tolist() == [100] * 10
    assert sorted(counts.argmax(1).tolist()) == list(range(10))


@pytest.mark.parametrize("seed", range(5))
def test_block_variant_counts_the_share_class_by_class(seed):
    """Once a client holds its fair share, 100 samples, it gets nothing of the classes that follow."""
    labels = ten_classes(2000)
    counts = class_counts(make(labels, kind="dirichlet", clients=20, alpha=0.5, seed=seed), labels, 10)
    before = counts.cumsum(1) - counts
    assert int((before >= 100).sum()) > 5  # so there is something to see
    assert int(counts[before >= 100].sum()) == 0


def test_block_variant_needs_no_redraw_where_the_share_alone_decides(monkeypatch):
    # As above: each class goes whole to one client, and then that client has its share, not one sample less.
    monkeypatch.setattr(sys.modules["solera.data.partition"], "MAX_REDRAWS", 1)  # the package has a function partition
    labels = torch.arange(10).repeat_interleave(100)
    for seed in range(5):
        split = make(labels, kind="dirichlet", clients=10, alpha=1e-9, seed=seed)
        assert split.sizes.tolist() == [100] * 10


def test_client_variant_draws_around_the_class_mix_of_the_whole():
    labels = torch.arange(10).repeat(1000).clamp(max=2)  # a tenth, a tenth and eight tenths
    counts = class_counts(make(labels, 3, kind="dirichlet", variant="client", clients=10, alpha=1e6), labels, 3)
    shares = counts / counts.sum(1, keepdim=True)
    assert float((shares - torch.tensor([0.1, 0.1, 0.8])).abs().max()) < 0.05


def test_client_variant_has_the_variance_of_its_draws():
    """Dir(alpha p) has mean p and variance p (1 - p) / (alpha + 1); n samples drawn by it add p (1 - p) alpha / (alpha
    + 1) / n. The first client's draw is not cut short by a class that has run out."""
    labels, alpha, n = torch.arange(10).repeat(200).clamp(max=2), 2.0, 100
    splits = [make(labels, 3, seed=s, kind="dirichlet", variant="client", clients=20, alpha=alpha) for s in range(400)]
    shares = np.array([(labels[split.indices(0)] == 2).double().mean() for split in splits])
    assert shares.mean() == pytest.approx(0.8, abs=0.035)
    assert shares.var() == pytest.approx(0.8 * 0.2 * (1 + alpha / n) / (alpha + 1), rel=0.2)


def test_class_variant_reaches_min_size():
    labels = ten_classes(5000)
    sizes = make(labels, kind="dirichlet", variant="class", clients=20, alpha=0.5, min_size=40).sizes
    assert int(sizes.min()) >= 40


def test_client_variant_has_equal_sizes_and_survives_exhausted_classes():
    labels = torch.cat([torch.zeros(900, dtype=torch.int64), torch.full((100,), 5)])  # classes 1..4, 6..9 are absent
    split = make(labels, kind="dirichlet", variant="client", clients=30, alpha=1e-6)
    assert set(split.sizes.tolist()) == {33, 34}
    assert class_counts(split, labels, 10).sum(0).tolist() == [900, 0, 0, 0, 0, 100, 0, 0, 0, 0]


def test_draws_are_dirichlet():
    # Dir(alpha * 1_K) has mean 1/K and variance (K-1) / (K^2 (K alpha + 1)).
    shares = dirichlet(np.full((40_000, 4), 0.5), np.random.default_rng(0))
    assert np.allclose(shares.sum(1), 1)
    assert np.allclose(shares.mean(0), 0.25, atol=0.01)
    assert np.allclose(shares.var(0), 3 / (16 * 3), atol=0.003)


def test_draws_stay_finite_for_any_alpha_and_respect_what_is_allowed():
    rng = np.random.default_rng(0)
    allowed = np.array([True, False, True])
    for alpha in (1e-300, 1e-12, 1e-3, 1.0, 1e9):
        shares = dirichlet(np.full((50, 3), alpha), rng, allowed)
        assert np.isfinite(shares).all()
        assert (shares[:, 1] == 0).all()
        assert np.allclose(shares.sum(1), 1)


@pytest.mark.parametrize(("clients", "per_client"), [(10, 2), (5, 2), (7, 3), (100, 2), (13, 10), (10, 1)])
def test_classes_kind_gives_exactly_so_many_classes(clients, per_client):
    labels = ten_classes(3000)
    counts = class_counts(make(labels, kind="classes", clients=clients, classes_per_client=per_client), labels, 10)
    assert ((counts > 0).sum(1) == per_client).all()
    holders = (counts > 0).sum(0)
    assert int(holders.max() - holders.min()) <= max(1, per_client)  # classes are dealt about equally often


def test_classes_kind_varies_the_pairs():
    labels = ten_classes(4000)
    counts = class_counts(make(labels, kind="classes", clients=100), labels, 10)
    assert len({tuple(row.nonzero().flatten().tolist()) for row in counts}) > 20


def test_quantity_skew_changes_sizes_and_not_the_mix():
    labels = ten_classes(20_000)
    split = make(labels, kind="quantity", clients=20, alpha=0.5, min_size=50)
    assert int(split.sizes.min()) >= 50
    assert int(split.sizes.max()) > 5 * int(split.sizes.min())
    largest = class_counts(split, labels, 10)[split.sizes.argmax()]
    assert float((largest / largest.sum() - 0.1).abs().max()) < 0.03
    near_equal = make(labels, kind="quantity", clients=20, alpha=1e8).sizes
    assert int(near_equal.max() - near_equal.min()) < 20


def by_user(users, names=None, seed=0, **options):
    labels = torch.zeros(len(users), dtype=torch.int64)
    return partition(PartitionConfig(kind="user", **options), labels, 1, seed, torch.as_tensor(users), names)


def test_every_user_is_a_client_by_name_whatever_the_seed():
    users = torch.randint(0, 40, (1000,), generator=torch.Generator().manual_seed(0))
    names = [f"site-{i:02d}" for i in reversed(range(40))]  # not in the order of the numbers
    for seed in range(3):
        split = by_user(users, names, seed)
        assert split.names == tuple(sorted(names))
        for k, name in enumerate(split.names):
            assert split.indices(k).tolist() == (users == names.index(name)).nonzero().flatten().tolist()


def test_fewer_clients_than_users_are_drawn_whole_and_keep_their_names():
    users, names = torch.arange(400) % 40, [f"u{i}" for i in range(40)]
    drawn = [by_user(users, names, seed, clients=12) for seed in (0, 0, 1)]
    assert drawn[0].names == drawn[1].names != drawn[2].names
    for split in drawn:
        assert len(split.names) == len(split) == 12
        for k, name in enumerate(split.names):
            assert split.indices(k).tolist() == list(range(names.index(name), 400, 40))


def test_users_without_names_are_called_by_number():
    assert by_user([7, 30, 7, 12]).names == ("12", "30", "7")
    assert by_user([7, 30, 7, 12]).indices(2).tolist() == [0, 2]


def test_what_a_user_is_called_does_not_depend_on_who_takes_part():
    names = ["Ann", "ann!", "bob"]  # the first two would both be ann
    every = by_user([0, 1, 1, 2, 2], names)
    some = by_user([0, 1, 1, 2, 2], names, min_size=2)
    assert set(some.names) < set(every.names)
    assert "ann" not in every.names


@pytest.mark.parametrize(
    ("user", "client"),
    [
        ("north-1", "north-1"),
        ("c.07_b", "c.07_b"),
        ("Hospital 3", "hospital-3"),
        ("Krankenhaus S\u00fcd", "krankenhaus-sud"),
        ("_TheSpecialOne_", "thespecialone"),
        ("../../etc/passwd", "etc-passwd"),
        ("a\x00b\nc", "a-b-c"),
        ("\u5317\u4eac", "user-" + hashlib.sha256("\u5317\u4eac".encode()).hexdigest()[:8]),
        ("", "user-e3b0c442"),
        ("x" * 65, "x" * 55 + "-" + hashlib.sha256(b"x" * 65).hexdigest()[:8]),
    ],
)
def test_names_that_cannot_be_folders_are_rewritten_by_the_stated_rule(user, client):
    assert client_names([user, "somebody else"]) == [client, "somebody-else"]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.text(max_size=70), unique=True, max_size=12))
def test_every_user_gets_a_safe_name_of_its_own(users):
    called = client_names(users)
    assert len(set(called)) == len(users)
    for user, name in zip(users, called, strict=True):
        assert SAFE_NAME.fullmatch(name)
        assert name == user or not SAFE_NAME.fullmatch(user)  # a name that can stay stays


def test_users_alike_but_for_case_are_told_apart():
    called = client_names(["alice", "Alice", "ALICE"])
    assert called[0] == "alice"
    assert all(name.startswith("alice-") for name in called[1:])


def test_a_partition_of_named_clients():
    split = Partition.of({"south": [5, 3], "north": torch.tensor([1]), "west": []})
    assert split.names == ("north", "south", "west")
    assert [split.indices(k).tolist() for k in range(3)] == [[1], [3, 5], []]


@pytest.mark.parametrize(
    ("order", "offsets", "names", "message"),
    [
        ([0, 1], [0, 1], None, "offsets .0, 1. must increase from 0 to the number of rows, 2"),
        ([0, 1], [1, 2], None, "must increase from 0"),
        ([0, 1], [0, 2, 1, 2], None, "must increase"),
        ([0, 1], [0], None, "must increase"),
        ([0.5, 1.0], [0, 2], None, "order must be a list of integers"),
        ([0, 1], [0, 1, 2], ("a",), "1 names for 2 clients"),
        ([0, 1], [0, 1, 2], ("b", "a"), r"names must differ and be sorted; Partition\.of"),
        ([0, 1], [0, 1, 2], ("a", "a"), "names must differ"),
        ([0, 1], [0, 1, 2], ("../a", "b"), r"client name '\.\./a'"),
    ],
)
def test_a_partition_that_contradicts_itself_is_refused(order, offsets, names, message):
    with pytest.raises(ConfigError, match=message):
        Partition(torch.tensor(order), torch.tensor(offsets), names)


def test_a_partition_is_a_copy():
    order, offsets = torch.tensor([4, 2, 0]), torch.tensor([0, 1, 3])
    split = Partition(order, offsets)
    order.zero_()
    offsets.zero_()
    assert [split.indices(k).tolist() for k in range(2)] == [[4], [0, 2]]


def test_the_number_of_clients_is_20_unless_it_follows_from_the_users():
    assert PartitionConfig().clients == PartitionConfig(kind="iid").clients == 20
    assert PartitionConfig(kind="user").clients is None


def test_users_with_too_few_samples_are_left_out_only_when_asked():
    users = torch.tensor([1] * 5 + [2] * 4 + [3])
    split = make(torch.zeros(10, dtype=torch.int64), 1, users=users, kind="user", clients=2, min_size=2)
    assert sorted(split.order.tolist()) == list(range(9))
    assert sorted(split.sizes.tolist()) == [4, 5]


def test_split_test_takes_the_rounded_share_of_each_client():
    split = Partition(torch.randperm(16, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 3, 6, 16]))
    train, test = split_test(split, 0.25, seed=5)
    assert test.sizes.tolist() == [0, 1, 1, 3]  # 1 sample: all for training; .5, .75 and 2.5 + .5 rounded down
    for k in range(4):
        assert sorted(train.indices(k).tolist() + test.indices(k).tolist()) == split.indices(k).tolist()
    again = split_test(split, 0.25, seed=5)
    assert torch.equal(again[1].order, test.order)
    assert not torch.equal(split_test(split, 0.25, seed=6)[1].order, test.order)
    assert split_test(split, 0.0, seed=5)[1].sizes.tolist() == [0, 0, 0, 0]
    with pytest.raises(ConfigError, match=r"test fraction = 1\.0"):
        split_test(split, 1.0, seed=5)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["iid", "quantity"])
def test_a_million_clients_are_two_tensors(kind):
    labels = torch.zeros(2_000_000, dtype=torch.int64)
    split = make(labels, 1, kind=kind, clients=1_000_000, alpha=1.0)
    assert vars(split).keys() == {"order", "offsets", "names"}
    assert split.names is None
    assert split.order.shape == (2_000_000,)
    assert split.offsets.shape == (1_000_001,)
    assert split.order.dtype == split.offsets.dtype == torch.int64
    assert int(split.sizes.min()) >= 1
    assert len(split.indices(999_999)) == int(split.sizes[-1])
    train, test = split_test(split, 0.5, seed=0)
    assert int(train.sizes.sum() + test.sizes.sum()) == 2_000_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, r"PartitionConfig\.clients = 0: expected an integer of at least 1"),
        ({"kind": "iid", "clients": 101}, r"partition\.clients = 101 .* only 100 training samples.* at most 100"),
        ({"kind": "iid", "clients": 20, "min_size": 6}, r"partition\.min_size = 6.* at most 16"),
        ({"kind": "iid", "min_size": 0}, r"PartitionConfig\.min_size = 0"),
        ({"alpha": 0.0}, r"PartitionConfig\.alpha = 0\.0: expected a number of at least 1e-09 \(small: skewed"),
        ({"kind": "quantity", "alpha": -1.0}, r"PartitionConfig\.alpha = -1\.0"),
        ({"alpha": float("inf")}, r"PartitionConfig\.alpha = inf"),
        ({"alpha": float("nan")}, r"PartitionConfig\.alpha = nan"),
        ({"kind": "classes", "classes_per_client": 11}, r"classes_per_client = 11: .* 10 classes"),
        ({"kind": "classes", "classes_per_client": 0}, r"classes_per_client = 0"),
        ({"kind": "classes", "clients": 4}, r"some classes would have no client; choose at least 5"),
        ({"kind": "classes", "clients": 90}, r"class \d has 10 samples for 18 clients"),
        ({"kind": "classes", "clients": 10, "min_size": 10, "classes_per_client": 1}, None),
        ({"kind": "user"}, r'partition\.kind = "user": this data set has no users'),
        ({"kind": "shards"}, r"PartitionConfig\.kind = \"shards\": expected one of 'iid', 'dirichlet'"),
        ({"variant": "hsu"}, r"PartitionConfig\.variant = \"hsu\""),
        ({"variant": "class", "alpha": 1e-3, "clients": 50}, r"10000 redraws never gave each of 50 clients"),
        ({"variant": "equal", "min_size": 6}, r'min_size = 6: variant .equal. has sizes of its own.*variant = "class"'),
        ({"variant": "class", "min_size": 6, "clients": 16, "alpha": 0.1}, r"redraws never .* partition\.min_size = 6"),
    ],
)
def test_impossible_requests_are_refused_with_key_value_and_way_out(options, message):
    labels = ten_classes(100)
    if message is None:  # just possible
        assert partition(PartitionConfig(**options), labels, 10, 0).sizes.tolist() == [10] * 10
        return
    with pytest.raises(ConfigError, match=message):
        partition(PartitionConfig(**options), labels, 10, 0)


def test_block_redraws_are_bounded():
    # Two classes among ten clients at alpha -> 0: two clients get everything, always.
    with pytest.raises(ConfigError, match=r"variant block.*redraws never gave each of 10 clients half of the fair"):
        partition(PartitionConfig(clients=10, alpha=1e-6), torch.arange(1000) % 2, 2, 0)


def test_by_user_refuses_fewer_users_than_clients():
    with pytest.raises(ConfigError, match=r"partition\.clients = 4: only 3 users .* at most 3 clients"):
        make(torch.zeros(9, dtype=torch.int64), 1, users=torch.arange(9) % 3, kind="user", clients=4)


def test_wrong_labels_and_numbers_are_refused():
    with pytest.raises(DataError, match=r"labels run from 0 to 9: they must lie in 0\.\.4"):
        make(ten_classes(), classes=5, kind="iid")
    with pytest.raises(DataError, match="3 users for 2000 samples"):
        make(ten_classes(), users=torch.arange(3), kind="user")
    with pytest.raises(IndexError, match="client 20: there are 20"):
        make(ten_classes(), kind="iid").indices(20)


# ---- FedDF's three divisions, and less data in the same one ------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_alpha_of_100_mimics_identical_local_data(seed):
    """FedDF's own sentence about alpha (section 4.1), which its Figure 10 draws for CIFAR-100 and 20 clients."""
    labels = torch.arange(45_000) % 100

    def shares(variant):
        counts = class_counts(make(labels, 100, seed, alpha=100.0, variant=variant), labels, 100).double()
        return counts / counts.sum(1, keepdim=True)

    def effective(shares):
        return float(torch.special.entr(shares).sum(1).exp().mean())

    equal, literal = shares("equal"), shares("client")
    assert float(equal.max()) < 0.03
    assert effective(equal) == pytest.approx(98.8, abs=0.4)
    assert float(literal.max()) > 0.05
    assert effective(literal) < 65


def test_equal_cuts_the_joined_lists_of_block_into_equal_parts():
    """The authors' code: the lists one after the other, in the order of classes, cut anew. So whoever `block` gave more
    than a part passes its last classes on to the next."""
    labels = ten_classes(2003)
    block = make(labels, clients=20, alpha=0.1, variant="block")
    equal = make(labels, clients=20, alpha=0.1, variant="equal")
    assert sorted(equal.sizes.unique().tolist()) == [100, 101]
    assert int(block.sizes.max()) > 101
    counts = class_counts(block, labels, 10)
    joined = [(k, c) for k in range(20) for c in range(10) for _ in range(int(counts[k, c]))]
    ends = [2003 * k // 20 for k in range(21)]
    expected = torch.zeros(20, 10, dtype=torch.int64)
    for k in range(20):
        for _, c in joined[ends[k] : ends[k + 1]]:
            expected[k, c] += 1
    assert torch.equal(class_counts(equal, labels, 10), expected)
    held = [set(block.indices(k).tolist()) for k in range(20)]
    before = sum(int(s) for s in block.sizes[:3])
    taken = set().union(*(set(equal.indices(k).tolist()) for k in range(20) if ends[k + 1] <= before))
    assert taken <= held[0] | held[1] | held[2]


def test_block_can_give_far_more_than_a_fair_share():
    """What keeps a client from more is that it gets no later class; the class that fills it may be large."""
    labels = torch.arange(45_000) % 10
    sizes = make(labels, clients=100, alpha=0.1, seed=1).sizes
    assert int(sizes.max()) > 1.5 * 450
    assert int(sizes.min()) >= 225


def test_a_fraction_keeps_part_of_each_client_in_the_same_partition():
    labels = ten_classes(2000)
    whole = make(labels, clients=7, alpha=1.0, kind="dirichlet")
    half = make(labels, clients=7, alpha=1.0, kind="dirichlet", fraction=0.5)
    assert half.sizes.tolist() == [int(n * 0.5 + 0.5) for n in whole.sizes.tolist()]
    for k in range(7):
        assert set(half.indices(k).tolist()) < set(whole.indices(k).tolist())
    firsts = torch.cat([whole.indices(k)[: int(half.sizes[k])] for k in range(7)])
    assert not torch.equal(half.order.sort().values, firsts.sort().values)  # drawn, not the first ones
    tiny = make(labels, clients=7, alpha=1.0, fraction=1e-6)
    assert tiny.sizes.tolist() == [1] * 7
    by_user = make(labels, kind="user", users=torch.arange(2000) % 5, fraction=0.25)
    assert by_user.names == ("0", "1", "2", "3", "4")
    assert by_user.sizes.tolist() == [100] * 5


@pytest.mark.parametrize("fraction", [0, 1.5, -0.1])
def test_impossible_fractions(fraction):
    with pytest.raises(ValueError, match="fraction"):
        PartitionConfig(fraction=fraction)
