"""Folders of images: what is read, in which shape, and what is refused."""

import numpy as np
import pytest
import torch

import solera
from solera.core.errors import ConfigError, DataError
from solera.data import PublicConfig, from_folder, load, make_public
from solera.runs import loop

Image = pytest.importorskip("PIL.Image")


def picture(path, size=(8, 8), value=100, mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(value)
    shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], 3)
    Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8), mode).save(path)


@pytest.fixture
def photos(tmp_path):
    """Two classes, twenty gray images of 8x8 each."""
    for i in range(20):
        picture(tmp_path / "photos" / "dog" / f"{i:02d}.png", value=i)
        picture(tmp_path / "photos" / "cat" / f"{i:02d}.png", value=100 + i)
    return tmp_path / "photos"


def pixels(path):
    return torch.from_numpy(np.array(Image.open(path)))


def test_classes_are_the_folders_in_the_order_of_their_names(photos):
    data = from_folder(photos)
    assert (data.classes, data.class_names, data.shape) == (2, ("cat", "dog"), (1, 8, 8))
    assert len(data.train) == 36
    assert len(data.test) == 4
    assert data.test.labels.tolist() == [0, 0, 1, 1]  # a tenth of each class
    images = torch.cat([data.train.inputs, data.test.inputs])
    labels = torch.cat([data.train.labels, data.test.labels])
    for kind, name in enumerate(data.class_names):
        found = {tuple(x.flatten().tolist()) for x in images[labels == kind]}
        assert found == {tuple(pixels(p).flatten().tolist()) for p in (photos / name).iterdir()}


def test_the_test_samples_are_always_the_same_and_as_many_as_asked_for(photos):
    a, b = from_folder(photos, test_size=10, seed=1), from_folder(photos, test_size=10, seed=1)
    assert len(a.test) == 10
    assert torch.equal(a.test.inputs, b.test.inputs)
    assert len(from_folder(photos, train_size=6).train) == 6


def test_folders_for_training_and_testing(photos, tmp_path):
    for name in ("cat", "dog"):
        picture(tmp_path / "both" / "val" / name / "x.png")
    photos.rename(tmp_path / "both" / "train")
    data = from_folder(tmp_path / "both")
    assert (len(data.train), len(data.test)) == (40, 2)


def test_a_class_may_be_called_train(photos):
    picture(photos / "train" / "1.png")
    assert from_folder(photos).class_names == ("cat", "dog", "train")


def test_colour_if_any_image_is_and_one_size_if_it_is_said(photos):
    picture(photos / "cat" / "wide.jpg", size=(20, 10), mode="RGB")
    with pytest.raises(DataError, match=r"wide\.jpg: 20x10 pixels, .*image_size"):
        from_folder(photos)
    data = from_folder(photos, image_size=12)
    assert data.shape == (3, 12, 12)
    assert data.train.inputs.dtype == torch.uint8
    assert len(data.mean) == 3


def test_hidden_folders_and_other_files_are_passed_over(photos):
    picture(photos / ".cache" / "1.png")
    picture(photos / "__MACOSX" / "1.png")
    (photos / "cat" / "notes.txt").write_text("not an image")
    assert from_folder(photos).class_names == ("cat", "dog")


def test_what_is_refused_is_named(photos, tmp_path):
    (photos / "bird").mkdir()
    with pytest.raises(DataError, match="bird: a class without images"):
        from_folder(photos)
    (photos / "bird" / "1.png").write_bytes(b"\x89PNG but no more")
    with pytest.raises(DataError, match=r"bird/1\.png"):
        from_folder(photos)
    picture(tmp_path / "one" / "cat" / "1.png")
    with pytest.raises(DataError, match="only the folder cat; expected a folder for each class"):
        from_folder(tmp_path / "one")
    with pytest.raises(DataError, match="no folders"):
        from_folder(photos / "cat")
    with pytest.raises(DataError, match="is not a folder"):
        from_folder(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"data\.path is missing"):
        load("folder")
    with pytest.raises(ConfigError, match="image_size = 0"):
        from_folder(photos / "..", image_size=0)
    with pytest.raises(ConfigError, match=r"only for data\.name = 'folder'"):
        load("fashion-mnist", image_size=14)


def test_a_test_class_that_training_lacks_is_refused(photos, tmp_path):
    photos.rename(tmp_path / "train")
    picture(tmp_path / "test" / "cat" / "1.png")
    picture(tmp_path / "test" / "fish" / "1.png")
    with pytest.raises(DataError, match="fish"):
        from_folder(tmp_path)


def test_a_configuration_reads_a_folder(photos, tmp_path):
    config = solera.load_config(
        {
            "run": {"rounds": 1},
            "data": {"name": "folder", "path": str(photos), "image_size": 28, "test_size": 8},
            "partition": {"kind": "iid", "clients": 2},
            "public": {"source": "dataset", "name": "folder", "path": str(photos / "dog")},
            "models": {"clients": ["mlp"]},
            "method": {"name": "feddf", "local": {"epochs": 1}, "fusion": {"steps": 2}},
            "engine": {"name": "inprocess"},
        }
    )
    assert "mlp" in loop.run(config, tmp_path / "run").summary["models"]


def test_public_images_need_no_classes_and_no_common_size(photos, tmp_path):
    for i, size in enumerate([(8, 8), (16, 8), (5, 9)]):
        picture(tmp_path / "more" / f"{i}.png", size=size, mode="RGB")
    task = from_folder(photos)
    public = make_public(PublicConfig("dataset", "folder", str(tmp_path / "more")), task, torch.tensor([]), 0)
    assert (len(public), public.shape, public.labels) == (3, (1, 8, 8), None)
    with pytest.raises(ConfigError, match="no labels"):
        make_public(PublicConfig("dataset", "folder", str(photos), labels=True), task, torch.tensor([]), 0)
    with pytest.raises(ConfigError, match=r"needs public\.path"):
        make_public(PublicConfig("dataset", "folder"), task, torch.tensor([]), 0)
