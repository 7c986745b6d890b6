"""Reading folders: small files of every format, whole and damaged."""

import gzip
import io
import lzma
import struct

import numpy as np
import pytest
import torch

from solera.core.errors import ConfigError, DataError
from solera.data import load, tokenize
from solera.data.readers import read_idx

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")


def rng():
    return np.random.default_rng(0)


def idx(array):
    array = np.asarray(array, np.uint8)
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder, prefix="", pack=lambda b: b, suffix="", n=(12, 6), first=0, size=28, labels=10):
    arrays = {}
    for split, count in zip(("train", "t10k" if not prefix else "test"), n, strict=True):
        images = rng().integers(0, 256, (count, size, size))
        arrays[split] = images
        (folder / f"{prefix}{split}-images-idx3-ubyte{suffix}").write_bytes(pack(idx(images)))
        (folder / f"{prefix}{split}-labels-idx1-ubyte{suffix}").write_bytes(
            pack(idx(np.arange(count) % labels + first))
        )
    return arrays


# -- IDX --


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_idx_plain_and_compressed(tmp_path, suffix, pack, caplog):
    arrays = write_idx(tmp_path, pack=pack, suffix=suffix)
    data = load("mnist", tmp_path)
    assert data.shape == (1, 28, 28)
    assert torch.equal(data.train.inputs[:, 0], torch.from_numpy(arrays["train"]).to(torch.uint8))
    assert data.train.labels.tolist() == [*range(10), 0, 1]
    assert (data.classes, data.mean, data.std) == (10, (0.1307,), (0.3081,))
    assert "12 of the 60000 train rows of the full set: a sample" in caplog.text
    assert "6 of the 10000 test rows" in caplog.text


def test_idx_in_a_folder_inside(tmp_path):
    (tmp_path / "raw").mkdir()
    write_idx(tmp_path / "raw")
    assert len(load("mnist", tmp_path).train) == 12


def test_emnist_letters_are_put_upright_and_counted_from_zero(tmp_path):
    arrays = write_idx(tmp_path, prefix="emnist-letters-", n=(52, 26), first=1, labels=26)
    data = load("emnist", tmp_path)
    assert torch.equal(data.train.inputs[3, 0], torch.from_numpy(arrays["train"][3].T).to(torch.uint8))
    assert (int(data.train.labels.min()), int(data.train.labels.max()), data.classes) == (0, 25, 26)


def test_other_splits_of_emnist_are_named(tmp_path):
    write_idx(tmp_path, prefix="emnist-balanced-")
    with pytest.raises(DataError, match=r"begin with emnist-balanced-.*begin with emnist-letters-"):
        load("emnist", tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b[:-1], r"announces 12x28x28 bytes but 9407 follow"),
        (lambda b: b + b"\0", r"announces 12x28x28 bytes but 9409 follow"),
        (lambda b: b"\0\0\x0d\x03" + b[4:], r"not an IDX file of bytes"),
        (lambda b: b[:7], r"not an IDX file"),
        (lambda b: b"", r"not an IDX file"),
    ],
)
def test_idx_files_that_contradict_themselves_are_refused(tmp_path, damage, message):
    write_idx(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        load("mnist", tmp_path)


def test_idx_with_too_few_labels_or_half_a_split_is_refused(tmp_path):
    write_idx(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(5)))
    with pytest.raises(DataError, match="12 images but 5 labels"):
        load("mnist", tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"of the train split only .*images-idx3-ubyte is there"):
        load("mnist", tmp_path)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_damaged_compression_is_refused(tmp_path, suffix):
    write_idx(
        tmp_path, pack=lambda b: gzip.compress(b)[:-9] if suffix == ".gz" else lzma.compress(b)[:-9], suffix=suffix
    )
    with pytest.raises(DataError, match="cannot be decompressed"):
        load("mnist", tmp_path)


def test_a_full_size_file_with_another_content_is_refused(tmp_path):
    path = tmp_path / "t10k-labels-idx1-ubyte"
    path.write_bytes(idx(np.zeros(10_000)))
    with pytest.raises(DataError, match=r"its sha256 is .* that of the published file is"):
        read_idx(path, sha256="0" * 64, rows=10_000)
    assert len(read_idx(path, sha256="0" * 64, rows=9_999)) == 10_000  # another number of rows: a sample


def test_more_rows_than_published_are_refused(tmp_path):
    write_idx(tmp_path, n=(12, 10_001), size=1)
    with pytest.raises(DataError, match="has 10001 test rows, the published set 10000"):
        load("mnist", tmp_path)


# -- CIFAR and STL-10 --


def cifar_records(n, label_bytes, classes):
    table = rng().integers(0, 256, (n, label_bytes + 3072), dtype=np.uint8)
    table[:, label_bytes - 1] = np.arange(n) % classes
    return table


def test_cifar10_binary(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    batches = [cifar_records(4, 1, 10), cifar_records(5, 1, 10)]
    for i, batch in enumerate(batches):
        (folder / f"data_batch_{i + 1}.bin").write_bytes(batch.tobytes())
    (folder / "test_batch.bin").write_bytes(cifar_records(3, 1, 10).tobytes())
    data = load("cifar10", tmp_path)
    assert (len(data.train), len(data.test), data.shape) == (9, 3, (3, 32, 32))
    assert data.train.labels.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert data.train.inputs[4].flatten().tolist() == batches[1][0, 1:].tolist()  # red, green, blue planes in order


def test_cifar100_binary_reads_the_fine_label(tmp_path):
    (tmp_path / "train.bin").write_bytes(cifar_records(100, 2, 100).tobytes())
    (tmp_path / "test.bin").write_bytes(cifar_records(7, 2, 100).tobytes())
    data = load("cifar100", tmp_path)
    assert data.train.labels.tolist() == list(range(100))
    assert (data.classes, data.shape) == (100, (3, 32, 32))


def test_cifar_of_broken_length_is_refused(tmp_path):
    (tmp_path / "train.bin").write_bytes(b"\0" * 3074 + b"\1")
    with pytest.raises(DataError, match="3075 bytes are not a whole number of records of 3074"):
        load("cifar100", tmp_path)


@pytest.mark.parametrize("names", [("data_batch_1", "test_batch"), ("train", "test", "meta"), ("cifar.pkl",)])
def test_pickles_are_not_read(tmp_path, names):
    for name in names:
        (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(DataError, match=r"pickle files .* not read because they can run code; get the binary version"):
        load("cifar10", tmp_path)


def test_stl10_binary_is_put_upright_and_counted_from_zero(tmp_path):
    images = rng().integers(0, 256, (4, 3, 96, 96), dtype=np.uint8)
    for split in ("train", "test"):
        (tmp_path / f"{split}_X.bin").write_bytes(images.tobytes())
        (tmp_path / f"{split}_y.bin").write_bytes(bytes([1, 10, 5, 1]))
    data = load("stl10", tmp_path)
    assert data.train.labels.tolist() == [0, 9, 4, 0]
    assert torch.equal(data.train.inputs[2, 1], torch.from_numpy(images[2, 1].T.copy()))
    (tmp_path / "train_y.bin").write_bytes(bytes([1, 2]))
    with pytest.raises(DataError, match="110592 bytes for 2 labels"):
        load("stl10", tmp_path)


# -- parquet --


def png(array, form="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, form)
    return buffer.getvalue()


def write_parquet(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=4)


def images(n, *shape):
    return rng().integers(0, 256, (n, *shape), dtype=np.uint8)


def test_parquet_images_with_the_hubs_columns(tmp_path):
    x = images(10, 32, 32, 3)
    cells = [{"bytes": png(i), "path": None} for i in x]
    write_parquet(tmp_path / "plain_text" / "train-00000-of-00002.parquet", img=cells[:7], label=list(range(7)))
    write_parquet(tmp_path / "plain_text" / "train-00001-of-00002.parquet", img=cells[7:], label=[7, 8, 9])
    write_parquet(tmp_path / "plain_text" / "test-00000-of-00001.parquet", img=cells[:2], label=[0, 1])
    data = load("cifar10", tmp_path)
    assert torch.equal(data.train.inputs, torch.from_numpy(x).permute(0, 3, 1, 2))
    assert data.train.labels.tolist() == list(range(10))
    assert len(data.test) == 2


def test_parquet_gray_pictures_in_a_colour_set_become_colour(tmp_path):
    cells = [{"bytes": png(images(1, 64, 64, 3)[0])}, {"bytes": png(images(1, 64, 64)[0])}]
    for split in ("train", "valid"):
        write_parquet(tmp_path / "data" / f"{split}-0.parquet", image=cells, label=[0, 199])
    data = load("tiny-imagenet", tmp_path)
    assert data.shape == (3, 64, 64)
    assert torch.equal(data.train.inputs[1, 0], data.train.inputs[1, 2])


def test_the_configuration_folder_is_chosen(tmp_path):
    cells = [{"bytes": png(images(1, 32, 32, 3)[0])}] * 2
    for split in ("train", "test", "extra"):
        write_parquet(tmp_path / "cropped_digits" / f"{split}-0.parquet", image=cells, label=[3, 4])
        write_parquet(tmp_path / "full_numbers" / f"{split}-0.parquet", image=cells, digits=[1, 2])
    assert load("svhn", tmp_path).train.labels.tolist() == [3, 4]
    with pytest.raises(DataError, match=r"several folders hold data \(cropped_digits, full_numbers\)"):
        load("owner/name", tmp_path)


def test_splits_may_be_folders(tmp_path):
    for split in ("train", "test"):
        write_parquet(tmp_path / split / "0000.parquet", text=["a", "b"], label=[0, 1])
    assert len(load("ag-news", tmp_path).train) == 2


def test_an_unnamed_set_is_understood_by_its_columns(tmp_path):
    cells = [{"bytes": png(i)} for i in images(6, 9, 7)]
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", image=cells, label=["b", "a", "c", "a", "b", "c"])
    data = load("owner/name", tmp_path)
    assert (data.name, data.shape, data.classes) == ("owner/name", (1, 9, 7), 3)
    assert data.train.labels.tolist() == [1, 0, 2, 0, 1, 2]
    assert abs(float(data.prepare(data.train.inputs).mean())) < 1e-5  # its own constants


def test_a_set_without_test_split_gives_up_a_tenth_always_the_same(tmp_path, caplog):
    write_parquet(tmp_path / "train.parquet", text=[f"w{i}" for i in range(40)], label=[0, 1] * 20)
    data = load("ag-news", tmp_path, seed=1)
    assert (len(data.train), len(data.test)) == (36, 4)
    assert data.test.labels.bincount().tolist() == [2, 2]
    assert "has no test split; 4 of its 40 training rows are used as one" in caplog.text
    assert torch.equal(data.test.inputs, load("ag-news", tmp_path, seed=2).test.inputs)
    seen = {tuple(row) for row in torch.cat([data.train.inputs, data.test.inputs]).tolist()}
    assert len(seen) == 40
    assert len(load("ag-news", tmp_path, test_size=10).test) == 10


def test_sentiment140_maps_its_labels_drops_neutral_rows_and_numbers_its_users(tmp_path):
    write_parquet(
        tmp_path / "train.parquet",
        text=["good", "bad", "fine", "sad"],
        sentiment=[4, 0, 4, 0],
        user=["u9", "u1", "u9", "u5"],
    )
    write_parquet(tmp_path / "test.parquet", text=["meh", "great"], sentiment=[2, 4], user=["x", "y"])
    data = load("sentiment140", tmp_path, length=5)
    assert data.train.labels.tolist() == [1, 0, 1, 0]
    assert data.users.tolist() == [2, 0, 2, 1]
    assert torch.equal(data.test.inputs, tokenize(["great"], 5))
    assert (data.vocabulary, data.shape) == (20_000, (5,))
    write_parquet(tmp_path / "test.parquet", text=["meh"], sentiment=[3], user=["x"])
    with pytest.raises(DataError, match=r"labels \[3\] are not among \[0, 2, 4\]"):
        load("sentiment140", tmp_path)


def test_sst2_takes_the_validation_split_because_its_test_split_has_no_labels(tmp_path):
    for split, label in (("train", 0), ("validation", 1), ("test", -1)):
        write_parquet(tmp_path / f"{split}.parquet", sentence=["x y"] * 2, label=[label] * 2)
    assert load("sst2", tmp_path).test.labels.tolist() == [1, 1]


def test_only_the_wanted_rows_are_decoded(tmp_path):
    good = {"bytes": png(images(1, 28, 28)[0])}
    write_parquet(tmp_path / "train.parquet", image=[good] * 20, label=list(range(10)) * 2)
    broken = [{"bytes": b"no picture"}] * 9 + [good]
    write_parquet(tmp_path / "test.parquet", image=broken, label=[1] * 9 + [0])
    with pytest.raises(DataError, match="image 0 cannot be decoded"):
        load("mnist", tmp_path)
    data = load("mnist", tmp_path, train_size=10, test_size=1)  # the first class comes first
    assert data.train.labels.bincount().tolist() == [1] * 10
    assert data.test.labels.tolist() == [0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": [{"bytes": png(images(1, 28, 28)[0])}], "klass": [0]}, "needs the columns image and label"),
        (
            {"image": [{"bytes": png(images(1, 28, 28)[0])}], "label": [None]},
            r"row 0 \(counted from 0\) of column 'label' is empty",
        ),
        ({"image": [{"bytes": png(images(1, 28, 28)[0])}], "label": [10]}, "labels run from 10 to 10, but with 10"),
        ({"image": [{"bytes": png(images(1, 28, 28)[0])}], "label": [-1]}, "rows without a label"),
        ({"image": [{"bytes": png(images(1, 28, 28)[0])[:60]}], "label": [0]}, "image 0 cannot be decoded"),
        (
            {"image": [{"bytes": png(images(1, s, s)[0])} for s in (28, 27)], "label": [0, 1]},
            r"sample 1 has shape \(27, 27\), sample 0 has \(28, 28\)",
        ),
    ],
)
def test_parquet_files_that_do_not_fit_are_refused(tmp_path, columns, message):
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", **columns)
    with pytest.raises(DataError, match=message):
        load("mnist", tmp_path)


def test_files_that_are_no_parquet_are_refused(tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"train\.parquet: cannot be read as parquet"):
        load("mnist", tmp_path)


# -- csv --


def test_csv_texts_with_a_header_like_the_hubs(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text('text,label\n"Hello, world",2\nbye,0\n')
    data = load("ag-news", tmp_path, length=4)
    assert torch.equal(data.train.inputs, tokenize(["Hello, world", "bye"], 4))
    assert data.train.labels.tolist() == [2, 0]


@pytest.mark.parametrize("header", ["", "Class Index,Title,Description\n"])
def test_ag_news_as_first_published(tmp_path, header):
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text(header + '"3","Title","Some text"\n"1","Other","words"\n')
    data = load("ag-news", tmp_path, length=4)
    assert data.train.labels.tolist() == [2, 0]
    assert torch.equal(data.train.inputs, tokenize(["Title Some text", "Other words"], 4))


def test_sentiment140_as_first_published(tmp_path):
    row = '"{}","1","Mon May 11","NO_QUERY","{}","{}"\n'
    train = row.format(4, "ann", "caf\xe9 is good") + row.format(0, "bob", "bad")
    (tmp_path / "training.1600000.processed.noemoticon.csv").write_bytes(train.encode("latin-1"))
    (tmp_path / "testdata.manual.2009.06.14.csv").write_text(row.format(2, "x", "meh") + row.format(0, "y", "no"))
    data = load("sentiment140", tmp_path, length=4)
    assert torch.equal(data.train.inputs, tokenize(["café is good", "bad"], 4))
    assert (data.train.labels.tolist(), data.users.tolist(), len(data.test)) == ([1, 0], [0, 1], 1)


def test_sst2_as_tab_separated_files(tmp_path):
    for split in ("train", "dev"):
        (tmp_path / f"{split}.tsv").write_text('sentence\tlabel\nit "is" good\t1\nbad , bad\t0\n')
    data = load("sst2", tmp_path, length=4)
    assert data.test.labels.tolist() == [1, 0]
    assert torch.equal(data.train.inputs, tokenize(["it is good", "bad bad"], 4))


@pytest.mark.parametrize("header", [True, False])
def test_csv_images(tmp_path, header):
    x = images(10, 28 * 28)
    lines = [",".join(map(str, [i, *row])) for i, row in enumerate(x)]
    head = [",".join(["label", *(f"pixel{i}" for i in range(784))])] if header else []
    for split in ("train", "test"):
        (tmp_path / f"fashion-mnist_{split}.csv").write_text("\n".join(head + lines) + "\n")
    data = load("fashion-mnist", tmp_path)
    assert data.train.labels.tolist() == list(range(10))
    assert torch.equal(data.train.inputs.flatten(1), torch.from_numpy(x))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("ag-news", "", "is empty"),
        ("ag-news", "1,only\n", "line 1 has 2 columns, expected 3"),
        ("sst2", "a,b\n1,2\n", "needs the columns sentence and label, but has a, b"),
        ("sst2", "sentence,label\n\xff,0\n", "cannot be read as csv"),
        ("mnist", "1,2,3\n", "must be a label and 784 pixels"),
        ("mnist", "1,2\n3\n", "cannot be read as rows"),
    ],
)
def test_csv_files_that_do_not_fit_are_refused(tmp_path, name, content, message):
    (tmp_path / "train.csv").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=message):
        load(name, tmp_path)


def test_wrong_sizes_are_refused(tmp_path):
    write_idx(tmp_path)
    with pytest.raises(ConfigError, match=r"train_size = 13: there are 12 such samples"):
        load("mnist", tmp_path, train_size=13)
    with pytest.raises(ConfigError, match=r"test_size = 0"):
        load("mnist", tmp_path, test_size=0)
