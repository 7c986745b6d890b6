"""Gray images of 16 bits a pixel keep their depth, wherever they come from."""

import io

import numpy as np
import pytest
import torch

from solera.core.errors import DataError
from solera.data import PublicConfig, from_folder, from_hf, from_tensors, from_torch, load, make_public, read_samples
from solera.data import transforms as T

Image = pytest.importorskip("PIL.Image")

DEEP = np.array([[0, 1, 255], [256, 40_000, 65_535]], np.uint16)  # more than 255 and less than one byte's step apart
FLAT = np.array([[0, 1, 2], [128, 200, 255]], np.uint8)


def deep(i=0):
    """Different images of 2x3 pixels."""
    return DEEP ^ np.uint16(i)


def encoded(array, form):
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, form)
    return buffer.getvalue()


def unit(array):
    return torch.from_numpy(array.astype(np.float64) / (65535 if array.dtype == np.uint16 else 255)).float()


def raw_of(data):
    """The training images on the scale from 0 to 1, before normalisation."""
    prepared = data.prepare(data.train.inputs)
    return prepared * torch.tensor(data.std)[:, None, None] + torch.tensor(data.mean)[:, None, None]


def write_folder(folder, arrays, form="PNG", suffix=".png"):
    for i, array in enumerate(arrays):
        home = folder / ("cat", "dog")[i % 2]
        home.mkdir(parents=True, exist_ok=True)
        (home / f"{i}{suffix}").write_bytes(encoded(array, form))
    return folder


@pytest.mark.parametrize(("form", "suffix"), [("PNG", ".png"), ("TIFF", ".tif"), ("PPM", ".pgm")])
def test_a_folder(tmp_path, form, suffix):
    write_folder(tmp_path / "train", [deep(i) for i in range(4)], form, suffix)
    write_folder(tmp_path / "test", [deep(9), deep(9)], form, suffix)
    data = from_folder(tmp_path)
    assert data.train.inputs.dtype == torch.uint16
    order = [0, 2, 1, 3]  # by class
    assert torch.allclose(raw_of(data), torch.stack([unit(deep(i)) for i in order])[:, None], atol=1e-6)
    values = torch.stack([unit(deep(i)) for i in order]).double()
    assert data.mean == pytest.approx(
        [float(values.mean())], rel=1e-6
    )  # normalised like bytes, by their own statistics
    assert data.std == pytest.approx([float(values.std(correction=0))], rel=1e-6)


def test_a_folder_of_both_depths_and_colour(tmp_path):
    colour = np.stack([FLAT, FLAT + 1, FLAT // 2], -1).astype(np.uint8)
    data = from_folder(write_folder(tmp_path, [DEEP, FLAT, colour, FLAT, DEEP, FLAT]), test_size=2)
    assert data.shape == (3, 2, 3)
    every = {tuple(x.flatten().tolist()) for x in torch.cat([data.train.inputs, data.test.inputs]).int()}
    wanted = [np.stack([DEEP] * 3), np.stack([FLAT] * 3).astype(int) * 257, colour.transpose(2, 0, 1).astype(int) * 257]
    assert every == {tuple(w.flatten().tolist()) for w in wanted}


def test_images_of_8_bits_stay_bytes(tmp_path):
    data = from_folder(write_folder(tmp_path, [FLAT] * 6), test_size=2)
    assert data.train.inputs.dtype == torch.uint8


def test_parquet(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for split, depth in (("train", deep), ("test", lambda i: FLAT)):  # the test split has none of 16 bits
        cells = [{"bytes": encoded(depth(i), "PNG"), "path": None} for i in range(3)]
        pq.write_table(pa.table({"image": cells, "label": [0, 1, 0]}), tmp_path / f"{split}-00000.parquet")
    data = load("owner/scans", tmp_path)
    assert torch.allclose(raw_of(data), torch.stack([unit(deep(i)) for i in range(3)])[:, None], atol=1e-6)
    prepared = data.prepare(data.test.inputs)[0, 0] * data.std[0] + data.mean[0]
    assert torch.allclose(prepared, unit(FLAT), atol=1e-6)  # on the same scale


class Rows:
    """What a Hugging Face data set offers: columns by name, rows by number."""

    def __init__(self, **columns):
        self.columns, self.column_names = columns, list(columns)

    def __len__(self):
        return len(self.columns[self.column_names[0]])

    def __getitem__(self, key):
        return self.columns[key] if isinstance(key, str) else {name: c[key] for name, c in self.columns.items()}


@pytest.mark.parametrize("form", [Image.fromarray, lambda array: array, lambda array: encoded(array, "PNG")])
def test_hugging_face(form):
    rows = Rows(image=[form(deep(i)) for i in range(3)], label=[0, 1, 0])
    data = from_hf(rows, rows)
    assert torch.allclose(raw_of(data), torch.stack([unit(deep(i)) for i in range(3)])[:, None], atol=1e-6)


def test_hugging_face_lists_of_pixels_are_images_and_no_tokens():
    rows = Rows(image=[FLAT.tolist(), FLAT.tolist()], label=[0, 1])
    data = from_hf(rows, rows)
    assert (data.train.inputs.dtype, data.shape, data.vocabulary) == (torch.uint8, (1, 2, 3), 0)


@pytest.mark.parametrize("form", [Image.fromarray, lambda array: array])
def test_torch_data_sets(form):
    pairs = [(form(deep(i)), i % 2) for i in range(3)]
    data = from_torch(pairs, pairs)
    assert torch.allclose(raw_of(data), torch.stack([unit(deep(i)) for i in range(3)])[:, None], atol=1e-6)


def test_arrays_and_tensors():
    x = np.stack([deep(i) for i in range(3)])
    for inputs in (x, torch.from_numpy(x), x.astype(">u2")):
        data = from_tensors((inputs, [0, 1, 0]), (inputs, [0, 1, 0]))
        assert torch.allclose(raw_of(data), torch.stack([unit(deep(i)) for i in range(3)])[:, None], atol=1e-6)
    with pytest.raises(DataError, match=r"values 0\.\.255; give uint16 for 0\.\.65535, or floats"):
        from_tensors((x.astype(np.int32), [0, 1, 0]), (x.astype(np.int32), [0, 1, 0]))


def test_samples_to_classify_and_public_images(tmp_path):
    task = from_tensors((np.stack([DEEP, DEEP]), [0, 1]), (np.stack([DEEP, DEEP]), [0, 1]), mean=(), std=())
    (tmp_path / "a.png").write_bytes(encoded(FLAT, "PNG"))
    (tmp_path / "b.png").write_bytes(encoded(DEEP, "PNG"))
    names, samples = read_samples(tmp_path, (1, 2, 3), None)
    assert names == ["a.png", "b.png"]
    wanted = torch.stack([unit(FLAT), unit(DEEP)])[:, None]
    assert torch.allclose(task.prepare(samples), wanted, atol=1e-6)
    public = make_public(PublicConfig("dataset", name="folder", path=str(tmp_path)), task, torch.arange(0), 0)
    assert torch.allclose(public[torch.arange(2)], wanted, atol=1e-6)


def test_transforms_keep_the_depth():
    images = torch.from_numpy(np.full((2, 1, 8, 8), 40_001, np.uint16))
    assert T.resize(images, 5, 4).unique().tolist() == [40_001]
    assert T.to_channels(T.to_channels(images, 3), 1).unique().tolist() == [40_001]
    task = from_tensors((images, [0, 1]), (images, [0, 1]))
    public = make_public(PublicConfig(augment=["crop", "jitter"]), task, torch.arange(2), 0)
    assert public.raw.dtype == torch.uint16
    fresh = make_public(PublicConfig(augment=["crop", "jitter"], fresh=True), task, torch.arange(2), 0)
    assert fresh.draw(torch.arange(2), 0).shape == (2, 1, 8, 8)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (
            np.array([[0, 70_000]], np.int32),
            "image 0 has int32 pixels from 0 to 70000; only gray images of 8 or 16 bits",
        ),
        (np.array([[-5, 70]], np.int32), "image 0 has int32 pixels from -5 to 70"),
        (np.array([[0.25, 3000.0]], np.float32), "image 0 has float32 pixels from 0.25 to 3000.0"),
    ],
)
def test_pixels_of_an_unknown_scale_are_refused_and_not_clipped(array, message):
    with pytest.raises(DataError, match=message):
        from_torch([(Image.fromarray(array), 0)], [(Image.fromarray(array), 0)])
