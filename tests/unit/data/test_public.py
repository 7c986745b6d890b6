"""Public data: where it comes from, what it shows, and how two parties recognise it."""

import re

import pytest
import torch

from solera.core.errors import ConfigError, DataError
from solera.data import (
    PublicConfig,
    from_tensors,
    make_public,
    public_from_dataset,
    public_from_generator,
    public_from_noise,
    public_from_samples,
    tokenize,
)
from solera.data import transforms as T
from solera.data.partition import torch_rng
from solera.data.transforms import augmented

NOBODY = torch.empty(0, dtype=torch.int64)
ALL = ["crop", "flip", "jitter", "gray"]  # Fed-ET's transformation


def own(task, **options):
    cfg = PublicConfig(**options)
    return public_from_samples(task, task.train.inputs, task.train.labels, cfg, seed=4)


def raw_of(public, task):
    """Undo the normalisation."""
    mean, std = (torch.tensor(v).reshape(1, -1, 1, 1) for v in (task.mean, task.std))
    return public[torch.arange(len(public))] * std + mean


def text_task(vocabulary=50, length=6, n=20):
    tokens = torch.randint(0, vocabulary, (n, length), generator=torch.Generator().manual_seed(0))
    return from_tensors((tokens, torch.arange(n) % 2), (tokens, torch.arange(n) % 2), vocabulary=vocabulary)


# -- a held-out part --


def test_held_out_samples_are_prepared_like_the_task_and_lose_their_labels(colour_task):
    held = torch.tensor([3, 1, 40])
    public = make_public(PublicConfig(), colour_task, held, seed=0)
    assert (len(public), public.shape, public.labels, public.fresh) == (3, (3, 12, 12), None, False)
    expected = colour_task.prepare(colour_task.train.inputs[held])
    assert torch.equal(public[torch.arange(3)], expected)
    assert torch.equal(public[torch.tensor([2, 0, 2])], expected[[2, 0, 2]])
    assert torch.equal(public.draw(torch.tensor([2, 0]), seed=9), expected[[2, 0]])


def test_labels_stay_on_request(colour_task):
    public = own(colour_task, labels=True)
    assert torch.equal(public.labels, colour_task.train.labels)


def test_storage_stays_bytes(colour_task):
    for public in (own(colour_task), own(colour_task, augment=ALL), own(colour_task, augment=ALL, fresh=True)):
        assert public.raw.dtype == torch.uint8


def test_classes_size_and_fraction_choose(colour_task):
    by_class = own(colour_task, classes=[1, 4], labels=True)
    assert set(by_class.labels.tolist()) == {1, 4}
    assert len(by_class) == 16
    assert len(own(colour_task, fraction=0.25)) == 12
    with pytest.raises(ConfigError, match=r"public\.fraction = 1e-09: of the public samples not one is left"):
        own(colour_task, fraction=1e-9)
    sized = public_from_dataset(colour_task, colour_task, PublicConfig(source="dataset", size=18, labels=True), seed=1)
    assert sized.labels.bincount().tolist() == [3] * 6  # in proportion to the classes
    assert torch.equal(
        own(colour_task, fraction=0.5)[torch.arange(24)], own(colour_task, fraction=0.5)[torch.arange(24)]
    )


def test_no_public_data(colour_task):
    assert make_public(PublicConfig(source="none"), colour_task, NOBODY, seed=0) is None


# -- another data set --


def test_another_data_set_is_resized_converted_and_normalised_by_the_task(colour_task):
    gray = torch.full((5, 1, 20, 24), 102, dtype=torch.uint8)
    other = from_tensors((gray, torch.arange(5)), (gray, torch.arange(5)), mean=(0.9,), std=(0.01,))
    public = public_from_dataset(colour_task, other, PublicConfig(source="dataset"))
    assert public.shape == (3, 12, 12)
    expected = (0.4 - torch.tensor(colour_task.mean)) / torch.tensor(colour_task.std)
    assert torch.allclose(public[torch.arange(5)], expected.reshape(1, 3, 1, 1).expand(5, 3, 12, 12), atol=1e-6)


def test_another_text_is_cut_or_padded():
    task = text_task(length=6)
    longer = public_from_dataset(task, text_task(length=9), PublicConfig(source="dataset"))
    assert torch.equal(longer[torch.arange(20)], text_task(length=9).train.inputs[:, :6])
    shorter = public_from_dataset(task, text_task(length=4), PublicConfig(source="dataset"))
    assert torch.equal(shorter[torch.arange(20)][:, :4], text_task(length=4).train.inputs)
    assert shorter[torch.arange(20)][:, 4:].unique().tolist() == [0]


def test_make_public_loads_by_name(colour_task):
    cfg = PublicConfig(source="dataset", name="fashion-mnist", size=30, labels=True)
    public = make_public(cfg, colour_task, NOBODY, seed=0)
    assert (len(public), public.shape) == (30, (3, 12, 12))
    assert public.labels.bincount().tolist() == [3] * 10


def test_make_public_reads_texts_at_the_length_of_the_task(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\n" + "one two three four,0\n" * 4)
    cfg = PublicConfig(source="dataset", name="ag-news", path=str(tmp_path))
    public = make_public(cfg, text_task(vocabulary=20_000, length=3), NOBODY, seed=0)
    assert torch.equal(public[torch.arange(3)], tokenize(["one two three"] * 3, 3))


# -- noise --


def test_uniform_noise_fills_the_range_evenly(colour_task):
    public = public_from_noise(colour_task, PublicConfig(source="noise", size=200), seed=1)
    values = raw_of(public, colour_task)
    assert (len(public), public.shape) == (200, (3, 12, 12))
    assert abs(float(values.mean()) - 0.5) < 0.01
    assert abs(float(values.std()) - 12**-0.5) < 0.01
    other = public_from_noise(colour_task, PublicConfig(source="noise", size=200), seed=2)
    assert public.digest != other.digest


def test_noise_for_vectors_fills_the_box_of_the_training_samples():
    inputs = torch.tensor([[0.0, -3.0], [1.0, 3.0], [0.5, 0.0]])
    task = from_tensors((inputs, [0, 1, 0]), (inputs, [0, 1, 0]))
    public = public_from_noise(task, PublicConfig(source="noise", size=2000), seed=1)
    values = public[torch.arange(2000)]
    assert values.shape == (2000, 2)
    assert values.amin(0).tolist() == pytest.approx([0, -3], abs=0.02)
    assert values.amax(0).tolist() == pytest.approx([1, 3], abs=0.02)
    assert values.mean(0).tolist() == pytest.approx([0.5, 0], abs=0.1)
    with pytest.raises(ConfigError, match=r"for vectors use public\.noise = 'uniform'"):
        public_from_noise(task, PublicConfig(source="noise", size=5, noise="gauss"), seed=1)


def test_gauss_noise_touches_both_ends_of_the_range_in_every_batch(colour_task):
    public = public_from_noise(colour_task, PublicConfig(source="noise", size=256, noise="gauss"), seed=1)
    values = raw_of(public, colour_task)
    for batch in values.split(128):
        assert float(batch.min()) == pytest.approx(0, abs=1e-6)
        assert float(batch.max()) == pytest.approx(1, abs=1e-6)
    assert float(values.std()) < 0.2  # a bell, not a box


# -- a generator --


class Generator(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)
        self.calls = 0

    def forward(self, z):
        self.calls += 1
        return self.drop(torch.sigmoid(z.mean(1)))[:, None, None, None].expand(-1, 3, 12, 12)


def test_a_generator_is_asked_once_in_eval_mode(colour_task):
    g = Generator().train()
    public = public_from_generator(g, colour_task, size=300, latent=5, seed=1)
    made = g.calls
    assert g.training  # put back
    assert not public.fresh
    z = torch.randn(300, 5, generator=torch_rng(1, "public generator"))
    expected = (torch.sigmoid(z.mean(1)) * 255).round() / 255  # no dropout
    assert torch.allclose(raw_of(public, colour_task)[:, 0, 0, 0], expected, atol=1e-6)
    assert torch.equal(public.draw(torch.arange(3), seed=1), public[torch.arange(3)])
    assert g.calls == made


def test_a_fresh_generator_draws_anew_for_each_seed(colour_task):
    public = public_from_generator(Generator(), colour_task, size=40, latent=5, seed=1, fresh=True)
    cached = public_from_generator(Generator(), colour_task, size=40, latent=5, seed=1)
    some = torch.arange(10)
    assert public.fresh
    assert torch.equal(public[some], cached[some])  # the fixed view is the same
    assert torch.equal(public.draw(some, seed=2), public.draw(some, seed=2))
    assert not torch.equal(public.draw(some, seed=2), public.draw(some, seed=3))
    assert public.digest != cached.digest  # they are not used alike


def test_generated_images_are_scaled_and_converted(colour_task):
    public = public_from_generator(
        lambda z: torch.full((len(z), 1, 7, 7), -0.2), colour_task, 2, (3, 1, 1), value_range=(-1, 1)
    )
    assert public.shape == (3, 12, 12)
    assert torch.allclose(raw_of(public, colour_task), torch.tensor(102 / 255), atol=1e-6)


@pytest.mark.parametrize(
    ("generate", "message"),
    [
        (lambda z: torch.full((len(z), 3, 12, 12), -1.0), r"range from -1 to -1, outside value_range"),
        (lambda z: torch.full((len(z), 3, 12, 12), float("nan")), r"outside value_range"),
        (lambda z: z, r"returned \(4, 5\) for 4 latent vectors"),
    ],
)
def test_strange_generators_are_refused(colour_task, generate, message):
    with pytest.raises(DataError, match=message):
        public_from_generator(generate, colour_task, 4, 5)


# -- augmentation --


def test_augmented_once_is_a_fixed_transformed_copy(colour_task):
    plain, once, again = own(colour_task), own(colour_task, augment=ALL), own(colour_task, augment=ALL)
    everything = torch.arange(48)
    assert not once.fresh
    assert torch.equal(once[everything], again[everything])
    assert torch.equal(once.draw(everything, seed=8), once[everything])
    assert not torch.equal(once[everything], plain[everything])
    expected = augmented(colour_task.train.inputs, ALL, torch_rng(4, "public augment"))
    assert torch.allclose(raw_of(once, colour_task), expected, atol=0.5 / 255 + 1e-6)


def test_fresh_samples_are_transformed_anew_with_each_seed_and_before_normalisation(colour_task):
    public = own(colour_task, augment=ALL, fresh=True)
    some = torch.tensor([5, 2, 5, 11])
    assert public.fresh
    assert torch.equal(public[some], own(colour_task)[some])  # the fixed view is not transformed
    assert torch.equal(public.draw(some, seed=1), public.draw(some, seed=1))
    assert not torch.equal(public.draw(some, seed=1), public.draw(some, seed=2))
    expected = augmented(colour_task.train.inputs[some], ALL, torch_rng(1, "public view"))
    assert torch.equal(public.draw(some, seed=1), T.normalise(expected, colour_task.mean, colour_task.std))
    assert not torch.equal(public.draw(some, seed=1)[0], public.draw(some, seed=1)[2])  # per sample, not per index


# -- rounds --


def test_round_indices(colour_task):
    public = own(colour_task)
    assert public.round_indices(None, seed=0).tolist() == list(range(48))
    drawn = public.round_indices(10, seed=1)
    assert len(set(drawn.tolist())) == 10
    assert drawn.tolist() == sorted(drawn.tolist())
    assert torch.equal(drawn, public.round_indices(10, seed=1))
    assert not torch.equal(drawn, public.round_indices(10, seed=2))
    with pytest.raises(ConfigError, match=r"public\.per_round = 49: there are 48 public samples"):
        public.round_indices(49, seed=0)


# -- the digest --


def test_equal_public_data_have_equal_digests(colour_task):
    assert own(colour_task).digest == own(colour_task).digest
    assert re.fullmatch(r"[0-9a-f]{64}", own(colour_task).digest)


def test_the_digest_changes_with_content_order_use_and_labels(colour_task):
    x, y = colour_task.train.inputs, colour_task.train.labels
    changed = x.clone()
    changed[7, 2, 3, 4] += 1
    order = torch.arange(48)
    order[[0, 1]] = order[[1, 0]]
    relabelled = y.clone()
    relabelled[0] = 5
    other_task = from_tensors((x, y), (x, y), mean=(0.1, 0.4, 0.3), std=(0.2, 0.25, 0.5))
    labelled = PublicConfig(labels=True)
    variants = [
        own(colour_task),
        public_from_samples(colour_task, changed, y),
        public_from_samples(colour_task, x[order], y[order]),
        public_from_samples(colour_task, x[:-1], y[:-1]),
        public_from_samples(other_task, x, y),
        own(colour_task, augment=ALL),
        own(colour_task, augment=ALL, fresh=True),
        public_from_samples(colour_task, x, y, labelled),
        public_from_samples(colour_task, x, relabelled, labelled),
        own(colour_task).subset(order),
    ]
    digests = [public.digest for public in variants]
    assert digests[-1] == digests[2]  # the same samples in the same order, however they came about
    assert len(set(digests[:-1])) == len(digests) - 1


def test_subset_keeps_samples_labels_and_use_together(colour_task):
    public = own(colour_task, labels=True, augment=ALL, fresh=True)
    part = public.subset(torch.tensor([9, 3]))
    assert (len(part), part.augment) == (2, ALL)
    assert part.labels.tolist() == public.labels[[9, 3]].tolist()
    assert torch.equal(part[torch.tensor([0])], public[torch.tensor([9])])
    online = public_from_generator(Generator(), colour_task, size=10, latent=5, fresh=True)
    assert torch.equal(online.subset(torch.tensor([4]))[torch.tensor([0])], online[torch.tensor([4])])


# -- what is refused --


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 0.0}, r"PublicConfig\.fraction = 0\.0"),
        ({"fraction": 1.5}, r"PublicConfig\.fraction = 1\.5"),
        ({"classes": []}, r"PublicConfig\.classes = \[\]: name at least one class"),
        ({"classes": [77]}, r"none of .* samples is left"),
        ({"augment": "always"}, r"PublicConfig\.augment = \"always\": expected a list of 'crop', 'flip', 'jitter'"),
        ({"augment": ["crp"]}, r"PublicConfig\.augment\[0\] = \"crp\": expected one of .*; did you mean 'crop'"),
        ({"fresh": True}, r"fresh = true: samples of source \"held-out\" are the same at each step"),
        ({"per_round": 100}, r"public\.per_round = 100: there are 48"),
        ({"per_round": 0}, r"PublicConfig\.per_round = 0: expected an integer of at least 1"),
        ({"source": "dataset"}, r"needs public\.name"),
        ({"source": "dataset", "name": "fashion-mnist", "size": 10_001}, r"public\.size = 10001: 10000 samples"),
        ({"source": "dataset", "name": "fashion-mnist", "classes": [10]}, r"fashion-mnist has the classes 0\.\.9"),
        ({"source": "noise"}, r"public\.size = None: set public\.size"),
        ({"source": "noise", "size": 5, "labels": True}, r"noise has no classes"),
        ({"source": "noise", "size": 5, "noise": "pink"}, r"PublicConfig\.noise = \"pink\""),
        ({"source": "gan"}, r"PublicConfig\.source = \"gan\": expected one of 'held-out', 'dataset'"),
    ],
)
def test_impossible_settings_are_refused(colour_task, options, message):
    with pytest.raises(ConfigError, match=message):
        make_public(PublicConfig(**options), colour_task, torch.arange(48), seed=0)


def test_kinds_of_data_are_not_mixed(colour_task):
    text = text_task()
    dataset = PublicConfig(source="dataset")
    with pytest.raises(ConfigError, match="images for images, text for text"):
        public_from_dataset(colour_task, text, dataset)
    with pytest.raises(ConfigError, match="both must use the same tokenizer"):
        public_from_dataset(text, text_task(vocabulary=60), dataset)
    with pytest.raises(ConfigError, match="makes images, but samples of own have shape"):
        public_from_noise(text, PublicConfig(source="noise", size=3))
    with pytest.raises(ConfigError, match="a generator makes images"):
        public_from_generator(lambda z: z, text, 3, 3)
    with pytest.raises(
        ConfigError,
        match=r"public\.augment = .*these steps need images, and the samples of the public data for own are",
    ):
        own(text, augment=ALL)


def test_float_images_outside_the_unit_range_are_not_transformed():
    x = torch.randn(4, 1, 5, 5)
    task = from_tensors((x, torch.arange(4) % 2), (x, torch.arange(4) % 2))
    with pytest.raises(ConfigError, match=r"need float images in \[0, 1\]"):
        own(task, augment=ALL, fresh=True)
    with pytest.raises(ConfigError, match="these samples have no labels"):
        public_from_samples(task, x, None, PublicConfig(labels=True))
    assert torch.equal(public_from_samples(task, x, None)[torch.arange(4)], x)
