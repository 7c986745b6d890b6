"""Train a small image generator on public images, for FedDF's distillation on generated images (its Figure 5).

It learns from the training images that a federation of `--federated` samples does not use (0: all images, of a data set
that no client holds). So clients and generator share no image. A run then uses it with the same seed and

    --set data.train_size=8000 --set public.source=generator --set public.path=generator.safetensors
    --set public.size=2000

A generative adversarial network after DCGAN (Radford, Metz, Chintala, ICLR 2016): Adam with learning rate 2e-4 and
beta_1 = 0.5, the non-saturating loss, images in [-1, 1]. About two minutes on one core with the defaults.

    python scripts/train_generator.py [--data fashion-mnist] [--federated 8000] [--seed 0] [--steps 1500] [--out FILE]
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solera.core.errors import ConfigError, SoleraError
from solera.data import balanced, load
from solera.data.public import Generator, save_generator

LR, BETAS = 2e-4, (0.5, 0.999)


def leftover(labels: Tensor, federated: int, seed: int) -> Tensor:
    """Indices of the training samples that a run with data.train_size = `federated` and this seed does not use."""
    if not 0 <= federated < len(labels):
        raise ConfigError(f"--federated {federated}: must be at least 0 and below {len(labels)}, the number of samples")
    left = torch.ones(len(labels), dtype=torch.bool)
    if federated:
        left[balanced(labels, federated, seed)] = False
    return left.nonzero().flatten()


def critic(shape: tuple[int, int, int], features: int) -> nn.Module:
    """DCGAN's discriminator, as deep as the generator: an image -> one logit, positive for "real"."""
    channels, height, width = shape
    sides = (height // 2 // 2) * (width // 2 // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 2 * features, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * features, 4 * features, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(4 * features),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(4 * features * sides, 1),
    )


def initialise(module: nn.Module) -> None:
    """DCGAN's initial weights: N(0, 0.02), and N(1, 0.02) for the scales of BatchNorm."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def train(images: Tensor, latent: int, features: int, steps: int, batch: int, seed: int) -> Generator:
    """A generator of images like these (bytes [n, C, H, W])."""
    torch.manual_seed(seed)
    channels, height, width = images.shape[1:]
    generator = Generator((channels, height, width), latent, features)
    judge = critic((channels, height, width), features)
    for net in (generator, judge):
        net.apply(initialise)
    makes = torch.optim.Adam(generator.parameters(), LR, BETAS)
    judges = torch.optim.Adam(judge.parameters(), LR, BETAS)
    began = time.monotonic()
    for step in range(1, steps + 1):
        real = images[torch.randint(len(images), (batch,))].float() / 127.5 - 1
        made = generator(torch.randn(batch, latent))
        judged = F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()
        judges.zero_grad()
        judged.backward()
        judges.step()
        fooled = F.softplus(-judge(made)).mean()
        makes.zero_grad()
        fooled.backward()
        makes.step()
        if step % 100 == 0 or step == steps:
            spent = time.monotonic() - began
            print(f"step {step}/{steps}  judge {judged.item():.3f}  generator {fooled.item():.3f}  {spent:.0f} s")
    return generator.eval()


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train a small image generator on images no client holds.")
    parser.add_argument("--data", default="fashion-mnist", help="data set, as data.name of the runs")
    parser.add_argument("--path", type=Path, help="its folder, as data.path")
    parser.add_argument("--federated", type=int, default=8000, help="data.train_size of the runs; 0: none of it")
    parser.add_argument("--seed", type=int, default=0, help="run.seed of the runs")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--latent", type=int, default=64, help="numbers in a latent vector")
    parser.add_argument("--features", type=int, default=16, help="width of the networks")
    parser.add_argument("--out", type=Path, default=Path("generator.safetensors"))
    args = parser.parse_args(arguments)
    try:
        whole = load(args.data, args.path)
        if whole.train.inputs.dtype != torch.uint8 or whole.train.inputs.ndim != 4:
            raise ConfigError(f"--data {args.data}: a generator learns from images, not from {tuple(whole.shape)}")
        images = whole.train.inputs[leftover(whole.train.labels, args.federated, args.seed)]
        print(f"{len(images)} images of {args.data} that no client of a run with {args.federated} of them holds")
        generator = train(images, args.latent, args.features, args.steps, args.batch, args.seed)
        save_generator(generator, args.out)
    except SoleraError as e:
        raise SystemExit(f"train_generator: {e}") from None
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
