"""Users' own data: tensors, torch data sets, Hugging Face data sets."""

import random

import numpy as np
import pytest
import torch

from solera.core.errors import DataError
from solera.core.task import Data
from solera.data import Dataset, from_hf, from_tensors, from_texts, from_torch, public_from_samples, tokenize

Image = pytest.importorskip("PIL.Image")


def labels(n):
    return torch.arange(n) % 2


def pixels(*shape):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("stored", "shape"),
    [
        ((6, 8, 9), (1, 8, 9)),
        ((6, 8, 9, 3), (3, 8, 9)),
        ((6, 8, 9, 1), (1, 8, 9)),
        ((6, 3, 8, 9), (3, 8, 9)),
        ((6, 5, 8, 9), (5, 8, 9)),
    ],
)
def test_image_layouts_become_channels_first(stored, shape):
    images = pixels(*stored)
    data = from_tensors((images, labels(6)), (images.numpy(), labels(6).numpy()))
    assert data.shape == shape
    assert data.train.inputs.dtype == torch.uint8
    assert torch.equal(data.train.inputs, data.test.inputs)
    axis = -1 if stored[-1] in (1, 3) and len(stored) == 4 else None
    if axis is not None:
        assert torch.equal(data.train.inputs[:, 0], images[..., 0])


def test_prepare_normalises_bytes_by_given_or_own_constants():
    images = pixels(50, 3, 4, 4)
    given = from_tensors((images, labels(50)), (images, labels(50)), mean=(0.5,) * 3, std=(0.25,) * 3)
    assert torch.allclose(given.prepare(images), (images / 255 - 0.5) / 0.25)
    own = from_tensors((images, labels(50)), (images, labels(50)))
    prepared = own.prepare(images)
    assert prepared.dtype == torch.float32
    assert torch.allclose(prepared.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(prepared.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)
    bare = from_tensors((images, labels(50)), (images, labels(50)), mean=(), std=())
    assert torch.equal(bare.prepare(images), images / 255)


def test_constant_images_do_not_divide_by_zero():
    images = torch.full((4, 1, 2, 2), 51, dtype=torch.uint8)
    data = from_tensors((images, labels(4)), (images, labels(4)))
    assert torch.allclose(data.prepare(images), torch.zeros(4, 1, 2, 2), atol=1e-7)


def test_floats_stay_and_tokens_pass_through():
    x = torch.randn(6, 3, 4, 4, dtype=torch.float64)
    data = from_tensors((x, labels(6)), (x, labels(6)))
    assert (data.train.inputs.dtype, data.mean) == (torch.float32, ())
    assert torch.equal(data.prepare(data.train.inputs), x.float())
    vectors = from_tensors((x.flatten(1), labels(6)), (x.flatten(1), labels(6)))
    assert vectors.shape == (48,)
    tokens = torch.tensor([[1, 7, 0], [2, 0, 0]], dtype=torch.int32)
    text = from_tensors((tokens, [0, 1]), (tokens, [1, 0]))
    assert (text.vocabulary, text.shape, text.classes) == (8, (3,), 2)
    assert torch.equal(text.prepare(text.train.inputs), tokens.long())


def test_arrays_of_any_origin_are_taken():
    x = pixels(6, 8, 9).numpy()
    fixed = x.copy()
    fixed.flags.writeable = False
    foreign = np.arange(6, dtype=">i4") % 2
    for array in (fixed, x[:, ::-1][:, ::-1], np.asfortranarray(x)):
        data = from_tensors((array, foreign), (x, foreign))
        assert torch.equal(data.train.inputs, data.test.inputs)
        assert data.train.labels.tolist() == [0, 1, 0, 1, 0, 1]


def test_users_may_be_names():
    x = pixels(4, 1, 2, 2)
    data = from_tensors((x, labels(4)), (x, labels(4)), users=["zoe", "ann", "zoe", "bob"])
    assert data.users is not None
    assert data.users.tolist() == [2, 0, 2, 1]


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        ((pixels(4, 1, 2, 2), [0, 1, 2, 3]), {"classes": 3}, r"labels run from 0 to 3, but with 3 classes"),
        ((pixels(4, 1, 2, 2), [0, 1, -1, 0]), {}, r"labels run from -1 to 1"),
        ((pixels(4, 1, 2, 2), [0, 1]), {}, r"own, train: 4 inputs but 2 labels"),
        ((pixels(4, 1, 2, 2), [0.5, 1.0, 0.0, 0.0]), {}, r"labels must be a list of integers"),
        ((pixels(0, 1, 2, 2), torch.empty(0, dtype=torch.int64)), {"classes": 2}, r"there are no samples"),
        ((torch.tensor([[0.0], [float("nan")]]), [0, 1]), {}, r"own, train: sample 1 has values that are not finite"),
        ((torch.tensor([[0.0], [float("inf")]]), [0, 1]), {}, r"not finite"),
        (([np.zeros((2, 2)), np.zeros((2, 3))], [0, 1]), {}, r"sample 1 has shape \(2, 3\), sample 0 has \(2, 2\)"),
        (([["a"], ["b"]], [0, 1]), {}, r"samples must be numbers, arrays, tensors or images"),
        ((torch.zeros(4), [0, 1, 0, 1]), {}, r"images \(3 or 4 dimensions\)"),
        ((torch.full((2, 2, 2), 300), [0, 1]), {}, r"values 0\.\.255"),
        ((torch.tensor([[5], [-2]]), [0, 1]), {"vocabulary": 9}, r"tokens run from -2 to 5"),
        ((pixels(2, 1, 2, 2), [0, 1]), {"mean": (0.1,)}, r"give both mean and std"),
        ((pixels(2, 1, 2, 2), [0, 1]), {"mean": (0.1,), "std": (0.0,)}, r"std must be above 0"),
        ((pixels(2, 3, 2, 2), [0, 1]), {"mean": (0.1, 0.2), "std": (1.0, 1.0)}, r"2 numbers for 3 channels"),
        ((pixels(2, 1, 2, 2), [0, 1]), {"users": [1, 2, 3]}, r"3 users for 2 training samples"),
    ],
)
def test_bad_data_is_refused_by_name(train, options, message):
    with pytest.raises(DataError, match=message):
        from_tensors(train, train, **options)


def test_labels_with_gaps_need_the_number_of_classes():
    train, test = (pixels(2, 1, 2, 2), [0, 3]), (pixels(2, 1, 2, 2), [0, 1])
    with pytest.raises(DataError, match=r"own: labels 0, 1, 3: 3 different .* 0 to 2; renumber them, or .* classes="):
        from_tensors(train, test)
    assert from_tensors(train, test, classes=7).classes == 7
    assert from_tensors(train, test, class_names="abcd").classes == 4
    assert from_tensors((train[0], [0, 2]), test).classes == 3  # each split lacks one
    with pytest.raises(DataError, match=r"own: labels 1: 1 different ones, but classes count from 0 to 0"):
        from_texts((["a"], [1]), (["b"], [1]))


def test_texts_without_a_text_and_texts_beside_pairs():
    good = (["a", "b"], [0, 1])
    with pytest.raises(DataError, match=r"own, test: 1 of 2 rows have no text \(counted from 0: 1\)"):
        from_texts(good, (["a", " \n"], [0, 1]))
    with pytest.raises(DataError, match=r"own, train: 1 of 1 rows have no text \(counted from 0: 0\)"):
        from_texts(([("", " ")], [0]), good)
    pairs = ([("a", "b"), ("c", "")], [0, 1])
    with pytest.raises(DataError, match=r"own: test, sample 0 is a text, train, sample 0 a pair of texts; give"):
        from_texts(pairs, good)
    with pytest.raises(DataError, match=r"own: train, sample 0 is a text, train, sample 1 a pair of texts"):
        from_texts((["a", ("b", "c")], [0, 1]), good)
    assert from_texts(pairs, pairs).texts.train == (("a", "b"), ("c", ""))


def test_train_and_test_must_fit_together():
    with pytest.raises(DataError, match=r"training samples have shape \(1, 2, 2\), test samples \(1, 3, 3\)"):
        from_tensors((pixels(2, 1, 2, 2), [0, 1]), (pixels(2, 1, 3, 3), [0, 1]))
    x = pixels(2, 1, 2, 2)
    with pytest.raises(DataError, match=r"uint8, test samples torch\.float32"):
        Dataset("own", 2, train=Data(x, labels(2)), test=Data(x.float(), labels(2)))


class Pairs(torch.utils.data.Dataset):
    """As torch data sets are: a length and items, no iteration, no IndexError at the end."""

    def __init__(self, make, n=6):
        self.make, self.n = make, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.make(i % self.n), i % 2


def test_torch_data_sets_of_tensors_and_of_pictures():
    x = pixels(6, 8, 9, 3)
    for make in (lambda i: x[i], lambda i: x[i].numpy(), lambda i: Image.fromarray(x[i].numpy())):
        data = from_torch(Pairs(make), Pairs(make), name="mine", classes=5)
        assert (data.name, data.classes, data.shape) == ("mine", 5, (3, 8, 9))
        assert torch.equal(data.train.inputs, x.permute(0, 3, 1, 2))
        assert data.train.labels.tolist() == [0, 1, 0, 1, 0, 1]


def test_pictures_of_mixed_modes_become_colour():
    x = pixels(2, 4, 4, 3)
    pictures = [Image.fromarray(x[0].numpy()), Image.fromarray(x[1, :, :, 0].numpy())]
    data = from_torch(Pairs(lambda i: pictures[i], 2), Pairs(lambda i: pictures[i], 2))
    assert data.shape == (3, 4, 4)
    assert torch.equal(data.train.inputs[1], x[1, :, :, 0].expand(3, 4, 4))


def test_torch_data_sets_with_strange_items_are_refused():
    with pytest.raises(DataError, match=r"sample 0 is not an \(input, label\) pair but int"):
        from_torch([1, 2], [1, 2])
    with pytest.raises(DataError, match=r"sample 1 has shape \(3, 3\)"):
        from_torch(Pairs(lambda i: torch.zeros(2 + i, 2 + i)), Pairs(lambda i: torch.zeros(2, 2)))


class Rows:
    """What a Hugging Face data set offers: columns by name, rows by number."""

    def __init__(self, **columns):
        self.columns = columns
        self.column_names = list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        return self.columns[key] if isinstance(key, str) else {name: c[key] for name, c in self.columns.items()}


def test_hugging_face_pictures():
    x = pixels(4, 5, 5, 3)
    rows = Rows(img=[Image.fromarray(i.numpy()) for i in x], label=[0, 1, 2, 0])
    data = from_hf(rows, rows, name="hub")
    assert (data.classes, data.shape, len(data.mean)) == (3, (3, 5, 5), 3)
    assert torch.equal(data.train.inputs, x.permute(0, 3, 1, 2))


def test_hugging_face_texts_with_users_and_named_labels():
    rows = Rows(tweet=["Good day", "bad day", "so so"], mood=["up", "down", "up"], who=["b", "a", "b"])
    data = from_hf(rows, rows, text="tweet", label="mood", user="who", length=4)
    assert torch.equal(data.train.inputs, tokenize(["Good day", "bad day", "so so"], 4))
    assert data.train.labels.tolist() == [1, 0, 1]
    assert data.users is not None
    assert data.users.tolist() == [1, 0, 1]
    assert data.vocabulary == 20_000


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"a": [1], "label": [0]}, {}, "needs the columns image or text and label, but has a, label"),
        ({"text": ["x"], "label": [0]}, {"label": "mood"}, "has no column 'mood'; it has text, label"),
        ({"text": ["x"], "label": [None]}, {}, r"row 0 .* of column 'label' is empty"),
        ({"text": ["x"], "label": [-1]}, {}, "rows without a label"),
        ({"text": ["x"], "label": [0.5]}, {}, "labels are floats"),
        ({"text": [3], "label": [0]}, {}, r"row 0 .* of column 'text' is int; expected text"),
        ({"text": ["x"], "label": [0]}, {"image": "text", "text": "text"}, "not both"),
        ({"text": ["x"], "label": [0]}, {"mean": (1.0,)}, "give both mean and std"),
    ],
)
def test_hugging_face_tables_that_do_not_fit_are_refused(columns, options, message):
    with pytest.raises(DataError, match=message):
        from_hf(Rows(**columns), Rows(**columns), **options)


# ---- the caller's own --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [lambda x: x, lambda x: x.numpy()], ids=["tensor", "array"])
@pytest.mark.parametrize(
    "make", [lambda: pixels(6, 1, 4, 4), lambda: torch.randn(6, 3), lambda: torch.randn(6, 1, 2, 2)]
)
def test_a_data_set_is_a_copy(make, form):
    x, y, users = make(), labels(6), torch.tensor([0, 0, 1, 1, 2, 2])
    whole = from_tensors((form(x), form(y)), (form(x), form(y)), classes=7, users=form(users))
    bare = Dataset("own", 7, whole.mean, whole.std, train=whole.train, test=whole.test, users=users)
    direct = Dataset("own", 7, whole.mean, whole.std, train=Data(whole.train.inputs, y), test=whole.test)
    kept = whole.train.inputs.clone(), y.clone(), users.clone()
    for theirs in (x, y, users):
        theirs.zero_()
    for data in (whole, bare, direct):
        assert torch.equal(data.train.inputs, kept[0])
        assert torch.equal(data.test.inputs, kept[0])
        assert torch.equal(data.train.labels, kept[1])
    assert whole.users.tolist() == bare.users.tolist() == kept[2].tolist()
    whole.train.inputs.zero_()
    assert torch.equal(bare.train.inputs, kept[0])


def test_data_sets_read_otherwise_are_copies_too():
    x = torch.randn(4, 3)
    pairs = [(x[i], i % 2) for i in range(4)]
    data, kept = from_torch(pairs, pairs), x.clone()
    x.zero_()
    assert torch.equal(data.train.inputs, kept)


def test_public_samples_are_a_copy():
    x = torch.randn(6, 3)
    task = from_tensors((x, labels(6)), (x, labels(6)), classes=7)
    public, kept = public_from_samples(task, x, labels(6)), x.clone()
    x.zero_()
    assert torch.equal(public[torch.arange(6)], kept)


# ---- random transforms -------------------------------------------------------------------------------


def flip_half(x):
    return x.flip(-1) if torch.rand(()) < 0.5 else x


def erase_seldom(x):
    return torch.zeros_like(x) if random.random() < 0.15 else x


RANDOM = {
    "torch": lambda x: x + torch.randn(x.shape),
    "numpy": lambda x: x + np.random.rand(),
    "python": lambda x: x * random.random(),
    "flip": flip_half,
    "seldom": erase_seldom,
}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("transform", RANDOM.values(), ids=RANDOM)
def test_random_transforms_are_refused_with_the_way_out(transform, split):
    x = torch.randn(40, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    fixed, changing = Pairs(lambda i: x[i], 40), Pairs(lambda i: transform(x[i]), 40)
    given = {"train": fixed, "test": fixed, split: changing}
    with pytest.raises(DataError, match=rf"mine, {split}: sample \d+ changes each time .*random.*transform=None"):
        from_torch(**given, name="mine")


def test_a_transform_with_a_generator_of_its_own_is_noticed():
    rng = np.random.default_rng(0)
    with pytest.raises(DataError, match="sample 0 changes each time"):
        from_torch(Pairs(lambda i: rng.random((2, 2, 1))), Pairs(lambda i: np.zeros((2, 2, 1))))


def test_random_transforms_of_hugging_face_rows_are_refused():
    class Changing(Rows):
        def __getitem__(self, key):
            found = super().__getitem__(key)
            return found if isinstance(key, str) else {**found, "image": found["image"] + np.random.rand(2, 2)}

    rows = Changing(image=[np.zeros((2, 2))] * 4, label=[0, 1, 0, 1])
    with pytest.raises(DataError, match="own, train: sample 0 changes each time"):
        from_hf(rows, rows)


def test_looking_for_random_transforms_draws_nothing():
    """Neither a fixed transform nor the caller's own generators notice that samples were read twice."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    x = pixels(6, 4, 4, 3)
    pictures = Pairs(lambda i: Image.fromarray(x[i].numpy()))
    from_torch(pictures, pictures)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert np.random.get_state()[1].tolist() == state[1]
    assert random.getstate() == state[2]


def test_a_transform_that_seeds_itself_by_position_is_fixed():
    def noisy(i):
        return torch.randn(1, 2, 2, generator=torch.Generator().manual_seed(i))

    data = from_torch(Pairs(noisy), Pairs(noisy))
    assert torch.equal(data.train.inputs[4], noisy(4))
