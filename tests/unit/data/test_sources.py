"""Sources by name: the embedded sample, where sets are looked for, the hub, and the development samples."""

import importlib.resources
import importlib.util
import lzma
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from solera.core.errors import ConfigError, DataError
from solera.data import SOURCES, PartitionConfig, class_counts, load, partition
from solera.data.readers import read_idx

ROOT = Path(__file__).resolve().parents[3]
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


# -- the embedded sample --


def test_the_embedded_sample_is_whole_and_balanced():
    data = load("fashion-mnist")
    assert (data.name, data.shape, data.classes) == ("fashion-mnist", (1, 28, 28), 10)
    assert data.train.inputs.dtype == torch.uint8
    assert data.train.labels.bincount().tolist() == [1000] * 10
    assert data.test.labels.bincount().tolist() == [200] * 10
    prepared = data.prepare(data.train.inputs)
    assert abs(float(prepared.mean())) < 0.02
    assert abs(float(prepared.std()) - 1) < 0.02
    assert not torch.equal(data.train.labels, data.train.labels.sort().values)  # not sorted by class


def test_the_embedded_sample_comes_with_its_licence():
    text = (importlib.resources.files("solera.data") / "embedded" / "LICENSE.txt").read_text()
    assert "MIT License" in text
    assert "Zalando SE" in text


def test_a_damaged_embedded_file_is_noticed(monkeypatch):
    monkeypatch.setitem(SOURCES["fashion-mnist"].embedded, "t10k-labels-idx1-ubyte", "0" * 64)
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.xz: its sha256 is"):
        load("fashion-mnist")


def test_the_script_makes_the_embedded_sample_again(tmp_path, monkeypatch, capsys):
    if not DEBIAN.is_dir():
        pytest.skip("the Debian package dataset-fashion-mnist is not installed")
    script = ROOT / "scripts" / "make_fashion_mnist_sample.py"
    spec = importlib.util.spec_from_file_location("make_fashion_mnist_sample", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The sums are of the uncompressed content: no need to squeeze.
    quick = SimpleNamespace(compress=lambda content, preset: lzma.compress(content, preset=0), PRESET_EXTREME=0)
    monkeypatch.setattr(module, "lzma", quick)
    monkeypatch.setattr(sys, "argv", ["make", "--out", str(tmp_path)])
    module.main()
    printed = dict(reversed(line.split()) for line in capsys.readouterr().out.splitlines())
    assert printed == SOURCES["fashion-mnist"].embedded
    assert read_idx(tmp_path / "t10k-images-idx3-ubyte.xz", printed["t10k-images-idx3-ubyte"]).shape == (2000, 28, 28)


def test_the_full_set_of_the_debian_package_passes_its_checksums(caplog):
    if not DEBIAN.is_dir():
        pytest.skip("the Debian package dataset-fashion-mnist is not installed")
    full, sample = load("fashion-mnist", DEBIAN), load("fashion-mnist")
    assert (len(full.train), len(full.test)) == (60_000, 10_000)
    assert not caplog.text  # no "sample" warning
    everything = {row.tobytes() for row in full.test.inputs.numpy()}
    assert all(row.tobytes() in everything for row in sample.test.inputs.numpy())


def test_samples_of_a_given_size_are_balanced_and_decided_by_the_seed():
    first, again, other = (load("fashion-mnist", train_size=105, test_size=20, seed=s) for s in (1, 1, 2))
    assert sorted(first.train.labels.bincount().tolist()) == [10] * 5 + [11] * 5
    assert first.test.labels.bincount().tolist() == [2] * 10
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert not torch.equal(first.train.inputs, other.train.inputs)


# -- names and places --


def test_every_named_source_says_what_it_is():
    assert [name for name in SOURCES if ":" not in name] == [  # a path is what a test before this one has named
        "fashion-mnist", "mnist", "emnist", "cifar10", "cifar100", "stl10", "svhn", "tiny-imagenet", "imagenet32",
        "ag-news", "sst2", "sentiment140", "toy-2d", "toy-text", "texts", "folder",
    ]  # fmt: skip
    for name, info in SOURCES.items():
        if name in ("folder", "texts") or ":" in name:  # nothing is known of it before it is read
            continue
        assert info.title
        assert info.licence
        assert info.made or info.formats
        assert info.made or "/" in info.hub
        assert info.classes >= 2
        assert info.rows is not None
        assert min(info.rows) > 0
        if not info.is_text and not info.made:
            assert len(info.mean) == len(info.std) == info.shape[0]


@pytest.mark.parametrize(
    "name", ["mnits", "../etc", "a/../b", "/etc/passwd", "a/b/c", "", "x" * 300, "a\0/b", "ünï/codé"]
)
def test_unknown_names_are_refused_before_anything_is_touched(name):
    with pytest.raises(ConfigError, match="is not known"):
        load(name)


def test_near_names_are_suggested():
    with pytest.raises(ConfigError, match="did you mean 'cifar10'"):
        load("cifar-10")


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """An empty working folder, no $SOLERA_DATA and no `datasets`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SOLERA_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    return tmp_path


def write_news(folder):
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.csv").write_text("text,label\nhello,3\nbye,0\n")


def test_the_usual_places_are_searched_in_order(nowhere, monkeypatch):
    write_news(nowhere / "data" / "ag_news")
    assert load("ag-news").train.labels.tolist() == [3, 0]
    write_news(nowhere / "elsewhere" / "ag-news")
    (nowhere / "elsewhere" / "ag-news" / "train.csv").write_text("text,label\none,1\n")
    monkeypatch.setenv("SOLERA_DATA", str(nowhere / "elsewhere"))
    assert load("ag-news").train.labels.tolist() == [1]
    write_news(nowhere / "elsewhere" / "owner" / "name")
    (nowhere / "elsewhere" / "owner" / "name" / "train.csv").write_text("text,label\none,1\ntwo,2\n")
    assert load("owner/name").classes == 4  # of which 0 and 3 are in the test split


def test_what_cannot_be_had_is_explained(nowhere):
    with pytest.raises(DataError) as error:
        load("cifar10")
    for words in ("data/cifar10", "$SOLERA_DATA is not set", "data_batch_1.bin", "uoft-cs/cifar10", "solera[hub]"):
        assert words in str(error.value)
    with pytest.raises(DataError, match="path = 'missing' is not a folder"):
        load("cifar10", "missing")
    with pytest.raises(DataError, match=r"cifar10: nothing to read in .*\. Put CIFAR binary files"):
        load("cifar10", nowhere)


# -- the hub --


class Rows:
    """What a Hugging Face data set offers: columns by name, rows by number."""

    def __init__(self, **columns):
        self.columns, self.column_names = columns, list(columns)

    def __len__(self):
        return len(self.columns[self.column_names[0]])

    def __getitem__(self, key):
        return self.columns[key] if isinstance(key, str) else {name: c[key] for name, c in self.columns.items()}


@pytest.fixture
def hub(nowhere, monkeypatch):
    """A stand-in for the package `datasets`, with the splits it is given."""

    def install(splits):
        asked = []

        def load_dataset(name, config=None):
            asked.append((name, config))
            if isinstance(splits, Exception):
                raise splits
            return splits

        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
        return asked

    return install


def test_the_hub_is_asked_by_id_and_configuration(hub, caplog):
    Image = pytest.importorskip("PIL.Image")
    pictures = [Image.fromarray(np.full((32, 32, 3), i, np.uint8)) for i in range(4)]
    rows = Rows(image=pictures, label=[0, 1, 2, 9])
    asked = hub({"train": rows, "test": rows, "extra": Rows(other=[1])})
    data = load("svhn")
    assert asked == [("ufldl-stanford/svhn", "cropped_digits")]
    assert (data.shape, data.classes, data.train.labels.tolist()) == ((3, 32, 32), 10, [0, 1, 2, 9])
    assert data.train.inputs[3].unique().tolist() == [3]
    assert "4 of the 73257 train rows" in caplog.text


def test_a_hub_id_and_another_name_for_the_test_split(hub):
    asked = hub({"train": Rows(text=["a", "b"], label=[0, 1]), "valid": Rows(text=["c"], label=[1])})
    data = load("owner/name")
    assert asked == [("owner/name", None)]
    assert (data.classes, len(data.test), data.shape) == (2, 1, (64,))


def test_the_hubs_failure_is_told(hub):
    hub(ConnectionError("no route"))
    with pytest.raises(DataError, match="fetching uoft-cs/cifar10 from the Hugging Face hub failed: no route"):
        load("cifar10")
    hub({"test": Rows(img=[], label=[])})
    with pytest.raises(DataError, match="has no training split, only test"):
        load("cifar10")


# -- real samples, where they are at hand --


@pytest.mark.parametrize(
    ("name", "folder", "shape", "classes"),
    [
        ("fashion-mnist", "fashion_mnist", (1, 28, 28), 10),
        ("mnist", "mnist", (1, 28, 28), 10),
        ("emnist", "az_letters", (1, 28, 28), 26),
        ("cifar10", "cifar10", (3, 32, 32), 10),
        ("cifar100", "cifar100", (3, 32, 32), 100),
        ("tiny-imagenet", "tiny_imagenet_32x32", (3, 32, 32), 200),
        ("imagenet32", "tiny_imagenet_32x32", (3, 32, 32), 1000),
    ],
)
def test_real_images(shared, name, folder, shape, classes):
    data = load(name, shared(folder), train_size=1000, test_size=200)
    assert (data.shape, data.classes, len(data.train), len(data.test)) == (shape, classes, 1000, 200)
    prepared = data.prepare(data.train.inputs)
    assert abs(float(prepared.mean())) < 0.1  # the catalogue's constants fit the real images
    assert abs(float(prepared.std()) - 1) < 0.1
    counts = data.train.labels.bincount()
    assert int(counts[counts > 0].max() - counts[counts > 0].min()) <= 1


@pytest.mark.parametrize(
    ("name", "folder", "classes", "test"),
    [("sst2", "sst2", 2, 872), ("ag-news", "ag_news", 4, 7600), ("sentiment140", "sentiment140_masked", 2, 359)],
)
def test_real_texts(shared, name, folder, classes, test):
    data = load(name, shared(folder), train_size=2000)
    assert (data.classes, data.shape, len(data.test)) == (classes, (64,), test)
    assert data.train.labels.bincount().tolist() == [2000 // classes] * classes
    assert bool((data.train.inputs[:, 0] > 0).all())
    assert (data.users is not None) == (name == "sentiment140")


def test_real_users_become_clients(shared):
    data = load("owner/airline", shared("airline_tweets_masked"))
    cfg = PartitionConfig(kind="user", clients=100, min_size=5)
    split = partition(cfg, data.train.labels, data.classes, 0, data.users)
    counts = class_counts(split, data.train.labels, data.classes)
    assert counts.shape == (100, 3)
    assert int(split.sizes.min()) >= 5
