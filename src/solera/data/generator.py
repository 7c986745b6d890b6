"""A small image generator, for distillation on generated images: z ~ N(0, I) -> [n, C, H, W] in [-1, 1].

It is DCGAN's generator; its layers are in parts.generators. scripts/train_generator.py trains one; this module only
reads and writes it. A file holds tensors and five settings, and nothing else is read from it.
"""

from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from ..core.errors import DataError
from ..train.generators import ImageDecoder

FORMAT = "solera generator 1"
LIMITS = {"channels": 4, "height": 256, "width": 256, "latent": 4096, "features": 1024}  # largest values in a file


class Generator(ImageDecoder):
    """Images of one `shape` (C, H, W) from vectors of `latent` numbers; `features` sets the width of the layers."""

    def __init__(self, shape: tuple[int, int, int], latent: int = 64, features: int = 32):
        channels, height, width = shape
        settings = {"channels": channels, "height": height, "width": width, "latent": latent, "features": features}
        for name, most in LIMITS.items():
            if not 1 <= settings[name] <= most:
                raise DataError(f"a generator with {name} = {settings[name]}: expected 1 to {most}")
        super().__init__((channels, height, width), latent, features)
        self.settings, self.latent = settings, latent


def save_generator(generator: Generator, path: str | Path) -> None:
    """Write a generator as safetensors, with its settings in the header."""
    about = {"format": FORMAT} | {name: str(value) for name, value in generator.settings.items()}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file({n: t.contiguous() for n, t in generator.state_dict().items()}, path, about)


def load_generator(path: str | Path) -> Generator:
    """Read a generator written by `save_generator`; in eval mode and frozen."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise DataError(f"{path} is not a generator: its format is {about.get('format')!r}, not {FORMAT!r}")
            s = {name: _whole(about.get(name), f"{path}: {name}") for name in LIMITS}
            with torch.device("meta"):  # allocates nothing: the header's sizes may be wrong
                generator = Generator((s["channels"], s["height"], s["width"]), s["latent"], s["features"])
            wanted = generator.state_dict()
            if odd := sorted(set(wanted) ^ set(file.keys())):
                raise DataError(f"{path}: the tensors are not those of a generator: {', '.join(odd[:3])}")
            weights = {name: file.get_tensor(name) for name in wanted}
    except (OSError, safetensors.SafetensorError) as e:
        raise DataError(f"cannot read the generator {path}: {e}; scripts/train_generator.py writes one") from None
    for name, t in wanted.items():
        if weights[name].shape != t.shape or weights[name].dtype != t.dtype:
            raise DataError(f"{path}: {name} is {tuple(weights[name].shape)}, a generator has {tuple(t.shape)}")
    generator.load_state_dict(weights, assign=True)
    generator.eval()
    return generator.requires_grad_(False)


def _whole(text: Any, what: str) -> int:
    if not (isinstance(text, str) and text.isdecimal() and len(text) < 8):
        raise DataError(f"{what} = {text!r} is not an integer")
    return int(text)
