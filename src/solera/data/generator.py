"""A small image generator, to distil on images that nobody took: z ~ N(0, I) -> [n, C, H, W] in [-1, 1].

DCGAN's generator (Radford, Metz, Chintala, ICLR 2016) with two doublings of the resolution, which suits images of
about 28 to 64 pixels. scripts/train_generator.py trains one; here it is only defined, read and written. A file of it
holds numbers and four settings, and nothing else is ever read from it.
"""

from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ..wire import DataError

FORMAT = "solera generator 1"
LIMITS = {"channels": 4, "height": 256, "width": 256, "latent": 4096, "features": 1024}  # a file may not ask for more


class Generator(nn.Module):
    """Images of one `shape` (C, H, W) from vectors of `latent` numbers; `features` says how wide the layers are."""

    def __init__(self, shape: tuple[int, int, int], latent: int = 64, features: int = 32):
        super().__init__()
        channels, height, width = shape
        self.settings = {"channels": channels, "height": height, "width": width, "latent": latent, "features": features}
        for name, most in LIMITS.items():
            if not 1 <= self.settings[name] <= most:
                raise DataError(f"a generator with {name} = {self.settings[name]}: 1 to {most} is possible")
        self.shape, self.latent = (channels, height, width), latent
        self.start = (4 * features, -(-height // 4), -(-width // 4))
        self.dense = nn.Sequential(
            nn.Linear(latent, self.start[0] * self.start[1] * self.start[2], bias=False),
            nn.Unflatten(1, self.start),
            nn.BatchNorm2d(4 * features),
            nn.ReLU(),
        )
        self.grow = nn.Sequential(
            nn.ConvTranspose2d(4 * features, 2 * features, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * features),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * features, channels, 4, stride=2, padding=1),
            nn.Tanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        """Images from latent vectors [n, latent]; sides that 4 does not divide are cut."""
        return self.grow(self.dense(z))[:, :, : self.shape[1], : self.shape[2]]


def save_generator(generator: Generator, path: str | Path) -> None:
    """Write a generator as safetensors, its settings in the header."""
    about = {"format": FORMAT} | {name: str(value) for name, value in generator.settings.items()}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file({n: t.contiguous() for n, t in generator.state_dict().items()}, path, about)


def load_generator(path: str | Path) -> Generator:
    """Read a generator that `save_generator` wrote; in evaluation mode, frozen."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise DataError(f"{path} holds no generator: its header says {about.get('format')!r}, not {FORMAT!r}")
            s = {name: _whole(about.get(name), f"{path}: {name}") for name in LIMITS}
            with torch.device("meta"):  # nothing is allocated for what the file may only claim to hold
                generator = Generator((s["channels"], s["height"], s["width"]), s["latent"], s["features"])
            wanted = generator.state_dict()
            if odd := sorted(set(wanted) ^ set(file.keys())):
                raise DataError(f"{path}: the tensors are not those of a generator: {', '.join(odd[:3])}")
            weights = {name: file.get_tensor(name) for name in wanted}
    except (OSError, safetensors.SafetensorError) as e:
        raise DataError(f"cannot read the generator {path}: {e}; scripts/train_generator.py makes one") from None
    for name, t in wanted.items():
        if weights[name].shape != t.shape or weights[name].dtype != t.dtype:
            raise DataError(f"{path}: {name} is {tuple(weights[name].shape)}, a generator has {tuple(t.shape)}")
    generator.load_state_dict(weights, assign=True)
    return generator.eval().requires_grad_(False)


def _whole(text: Any, what: str) -> int:
    if not (isinstance(text, str) and text.isdecimal() and len(text) < 8):
        raise DataError(f"{what} = {text!r} is not a whole number")
    return int(text)
