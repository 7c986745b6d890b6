"""A folder of images, with a folder for each class.

photos/cat/*.png, photos/dog/*.jpg                   a part of these becomes the test samples
photos/train/cat/*.png, ..., photos/test/cat/*.png   the test samples are in test/
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError, DataError
from .images import is_deep, is_gray, open_picture, stack_pictures
from .readers import Split
from .transforms import to_shape
from .unlabelled import PICTURES

SPLITS = {"train": ("train", "training"), "test": ("test", "testing", "val", "valid", "validation")}
LAYOUT = "a folder for each class with images in it, such as cat/1.png and dog/1.png (or train/cat/1.png, test/cat/...)"


def folder_splits(folder: Path, size: int | None) -> dict[str, Split]:
    """The training split and, if there is one, the test split of a folder of images. Labels are the folders' names.

    With `size` every image is resized to `size` x `size` pixels; without it all must have the same size. The result is
    gray if every image is gray, and colour otherwise; uint16 if any image has 16 bits per pixel.
    """
    if size is not None and size < 1:
        raise ConfigError(f"data.image_size = {size}: at least 1 pixel is needed")
    files = {split: _pictures_by_class(home) for split, home in homes(folder).items()}
    every = [path for rows in files.values() for path, _ in rows]
    shape, deep = _common_form(every, size)
    return {
        split: Split(
            np.array([name for _, name in rows]),
            lambda wanted, rows=rows: decoded([rows[i][0] for i in wanted], shape, deep),  # type: ignore[misc]
        )
        for split, rows in files.items()
    }


def homes(folder: Path) -> dict[str, Path]:
    """The folder that contains the class folders, for each split."""
    inside = {path.name.lower(): path for path in class_folders(folder)}
    found = {split: next((inside[n] for n in names if n in inside), None) for split, names in SPLITS.items()}
    train, test = found["train"], found["test"]
    if train is None or not class_folders(train):
        return {"train": folder}
    return {"train": train} if test is None else {"train": train, "test": test}


def class_folders(folder: Path) -> list[Path]:
    """The folders in a folder, sorted."""
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith((".", "__")))


def pictures_in(folder: Path) -> list[Path]:
    """The images in a folder and its subfolders, sorted."""
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in PICTURES and p.is_file())


def _pictures_by_class(home: Path) -> list[tuple[Path, str]]:
    """Every image below the class folders of `home`, with the name of its class."""
    classes = class_folders(home)
    if len(classes) < 2:
        there = f"only the folder {classes[0].name}" if classes else "no folders"
        raise DataError(f"{home}: contains {there}; expected {LAYOUT}")
    rows = []
    for home_of_class in classes:
        pictures = pictures_in(home_of_class)
        if not pictures:
            raise DataError(f"{home_of_class}: a class without images ({', '.join(PICTURES)}); add some or remove it")
        rows += [(path, home_of_class.name) for path in pictures]
    return rows


def _common_form(paths: list[Path], size: int | None) -> tuple[tuple[int, int, int], bool]:
    """Channels, height and width of all images, and whether any has 16 bits per pixel, from their headers."""
    channels, deep, first = 1, False, None
    for path in paths:
        picture = open_picture(path.read_bytes(), str(path), 0)
        channels, deep = channels if is_gray(picture) else 3, deep or is_deep(picture)
        first = first or picture.size
        if size is None and picture.size != first:
            raise DataError(
                f"{path}: {picture.size[0]}x{picture.size[1]} pixels, {paths[0]} has {first[0]}x{first[1]}; "
                "give a size for all of them: image_size=64 (in a TOML file: data.image_size = 64)"
            )
    assert first is not None  # there are two classes, each with an image
    height, width = (first[1], first[0]) if size is None else (size, size)
    return (channels, height, width), deep


def decoded(paths: list[Path], shape: tuple[int, ...], deep: bool) -> Tensor:
    """Images in one form: channels, height and width, and 16 bits per pixel or 8."""
    return torch.cat([to_shape(stack_pictures([p.read_bytes()], str(p), shape[0], deep), shape) for p in paths])
