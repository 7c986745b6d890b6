"""The classes of ImageNet that do not overlap with CIFAR-100, and STL-10's images without labels."""

import numpy as np
import pytest
import torch

from solera.core.errors import ConfigError, DataError
from solera.data import PublicConfig, from_tensors, make_public, public_from_dataset
from solera.data.catalogue import OVERLAP, named_classes

# A few of each kind, by the class names of ILSVRC 2012: tiger shark, goldfish, brown bear, school bus, sea lion,
# laptop's neighbours, ...
SAME = {3: "shark", 1: "aquarium_fish", 294: "bear", 779: "bus", 150: "seal", 508: "keyboard", 945: "sweet_pepper"}
APART = {0: "tench", 207: "golden retriever", 404: "airliner", 417: "balloon", 579: "grand piano", 963: "pizza"}


def test_the_list_follows_the_names():
    apart = named_classes("imagenet-without-cifar100")
    assert not set(SAME) & set(apart)
    assert set(APART) <= set(apart)
    assert all(i in OVERLAP[name] for i, name in SAME.items())
    every = [i for classes in OVERLAP.values() for i in classes]
    assert sorted({i for i in every if every.count(i) > 1}) == [148]  # a killer whale is a dolphin, and called a whale
    assert len(apart) == 1000 - len(set(every))
    assert apart == sorted(apart)
    assert (min(every), max(every)) == (1, 997)


def test_so_many_of_them_evenly_spaced():
    apart = named_classes("imagenet-without-cifar100")
    ten = named_classes("imagenet-without-cifar100:10")
    assert ten == [apart[i * len(apart) // 10] for i in range(10)]
    assert named_classes(f"imagenet-without-cifar100:{len(apart)}") == apart


@pytest.mark.parametrize("name", ["imagenet", "imagenet-without-cifar100:0", "imagenet-without-cifar100:999", "x:3"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match=r"classes = .*expected a list of class numbers"):
        PublicConfig(classes=name)


def images(n, classes, size=8):
    g = torch.Generator().manual_seed(n)
    return torch.randint(0, 256, (n, 3, size, size), generator=g, dtype=torch.uint8), torch.arange(n) % classes


def test_a_named_list_chooses_the_samples():
    task = from_tensors(images(40, 4), images(8, 4), classes=4)
    other = from_tensors(images(2000, 1000), images(8, 1000), classes=1000)
    cfg = PublicConfig(source="dataset", name="x", classes="imagenet-without-cifar100:50", labels=True)
    public = public_from_dataset(task, other, cfg)
    assert sorted(set(public.labels.tolist())) == named_classes(cfg.classes)
    assert len(public) == 100
    small = from_tensors(images(40, 4), images(8, 4), classes=4)
    with pytest.raises(ConfigError, match="has the classes"):
        public_from_dataset(task, small, cfg)


def stl10(folder, n=5):
    """As published: each image by channels, and each channel by columns."""
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (n, 3, 96, 96), np.uint8)  # rows, columns
    pixels.swapaxes(2, 3).tofile(folder / "unlabeled_X.bin")
    return torch.from_numpy(pixels)


def test_stl10_without_labels(tmp_path, monkeypatch):
    wanted = stl10(tmp_path / "stl10")
    task = from_tensors(images(40, 4, 96), images(8, 4, 96), classes=4)
    cfg = PublicConfig(source="dataset", name="stl10-unlabelled", path=str(tmp_path / "stl10"))
    public = make_public(cfg, task, torch.arange(0), 0)
    assert torch.equal(public.raw, wanted)
    assert public.labels is None
    monkeypatch.setenv("SOLERA_DATA", str(tmp_path))
    monkeypatch.setattr("solera.data.sources.PART", 2)  # read in parts
    some = make_public(PublicConfig(source="dataset", name="stl10-unlabelled", size=3), task, torch.arange(0), 0)
    assert len(some) == 3
    assert all(any(torch.equal(one, image) for image in wanted) for one in some.raw)
    tiny = from_tensors(images(40, 4), images(8, 4), classes=4)
    shrunk = make_public(PublicConfig(source="dataset", name="stl10-unlabelled"), tiny, torch.arange(0), 0)
    assert tuple(shrunk.raw.shape) == (5, 3, 8, 8)
    with pytest.raises(ConfigError, match="no labels"):
        make_public(PublicConfig(source="dataset", name="stl10-unlabelled", labels=True), task, torch.arange(0), 0)


def test_stl10_that_is_not_there_or_damaged(tmp_path):
    task = from_tensors(images(40, 4), images(8, 4), classes=4)
    cfg = PublicConfig(source="dataset", name="stl10-unlabelled", path=str(tmp_path))
    with pytest.raises(DataError, match=r"no unlabeled_X.bin in .*stl10_binary.tar.gz"):
        make_public(cfg, task, torch.arange(0), 0)
    (tmp_path / "unlabeled_X.bin").write_bytes(bytes(100))
    with pytest.raises(DataError, match="100 bytes are not a whole number"):
        make_public(cfg, task, torch.arange(0), 0)
