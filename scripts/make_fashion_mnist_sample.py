"""Make the Fashion-MNIST sample that ships inside the package.

It takes the first 1,000 training and the first 200 test images of every class, in the order of the full set,
and writes them as xz-compressed IDX files. The full set is the Debian package `dataset-fashion-mnist`
(`apt-get install dataset-fashion-mnist`); its files are checked before they are used.

    python scripts/make_fashion_mnist_sample.py [--source FOLDER] [--out FOLDER]

The sums printed at the end are those of the uncompressed files; `data/catalogue.toml` holds them.
"""

import argparse
import gzip
import hashlib
import lzma
import struct
from pathlib import Path

import numpy as np

SOURCE = Path("/usr/share/datasets/fashion-mnist")
OUT = Path(__file__).parents[1] / "src" / "solera" / "data" / "embedded"
PER_CLASS = {"train": 1000, "t10k": 200}
FULL_SET = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


def read(folder: Path, name: str) -> np.ndarray:
    """One original file as an array, after checking that it is the original."""
    content = gzip.decompress((folder / f"{name}.gz").read_bytes())
    if hashlib.sha256(content).hexdigest() != FULL_SET[name]:
        raise SystemExit(f"{folder / name}.gz is not the published file: its sha256 differs")
    dimensions = content[3]
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def write(folder: Path, name: str, array: np.ndarray) -> str:
    """Write one xz-compressed IDX file; returns the sha256 of its uncompressed content."""
    content = struct.pack(f">4B{array.ndim}I", 0, 0, 0x08, array.ndim, *array.shape) + array.tobytes()
    packed = lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)
    (folder / f"{name}.xz").write_bytes(packed)
    return hashlib.sha256(content).hexdigest()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the embedded Fashion-MNIST sample.")
    parser.add_argument("--source", type=Path, default=SOURCE, help="folder with the four IDX .gz files")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write to")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for split, count in PER_CLASS.items():
        images = read(args.source, f"{split}-images-idx3-ubyte")
        labels = read(args.source, f"{split}-labels-idx1-ubyte")
        keep = np.sort(np.concatenate([np.flatnonzero(labels == c)[:count] for c in range(10)]))
        for name, array in (
            (f"{split}-images-idx3-ubyte", images[keep]),
            (f"{split}-labels-idx1-ubyte", labels[keep]),
        ):
            print(write(args.out, name, array), name)


if __name__ == "__main__":
    main()
