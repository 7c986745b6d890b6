"""The image generator: its file, and public data made by it."""

import importlib.util
import json
import pathlib
import struct

import pytest
import safetensors.torch
import torch

from solera.core.errors import ConfigError, DataError
from solera.data import PublicConfig, from_tensors, load, make_public
from solera.data.public import FORMAT, Generator, load_generator, save_generator
from solera.runs.config import load_config
from solera.scenario.scenario import Scenario

NOBODY = torch.empty(0, dtype=torch.int64)
SCRIPT = pathlib.Path(__file__).parents[3] / "scripts" / "train_generator.py"


def generator(shape=(1, 10, 14), latent=6, features=4) -> Generator:
    torch.manual_seed(0)
    made = Generator(shape, latent, features)
    made(torch.randn(32, latent))  # statistics that are not the initial ones
    return made.eval()


@pytest.fixture
def file(tmp_path) -> pathlib.Path:
    save_generator(generator(), tmp_path / "deep" / "g.safetensors")
    return tmp_path / "deep" / "g.safetensors"


def gray_task(shape=(1, 10, 14)):
    x = torch.randint(0, 256, (30, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(30) % 3
    return from_tensors((x, y), (x, y), name="gray", mean=(0.5,) * shape[0], std=(0.25,) * shape[0])


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 10, 14), (3, 5, 7)])
def test_images_have_the_shape_asked_for(shape):
    images = generator(shape)(torch.randn(3, 6))
    assert images.shape == (3, *shape)
    assert bool((images.abs() <= 1).all())


def test_what_is_written_is_read(file):
    back, z = load_generator(file), torch.randn(5, 6)
    assert torch.equal(back(z), generator()(z))
    assert (back.shape, back.latent, back.training) == ((1, 10, 14), 6, False)
    assert not any(p.requires_grad for p in back.parameters())


def test_public_data_from_a_file(file):
    task = gray_task()
    cfg = PublicConfig(source="generator", path=str(file), size=40)
    public = make_public(cfg, task, NOBODY, seed=3)
    assert (len(public), public.shape, public.fresh, public.labels) == (40, (1, 10, 14), False, None)
    assert public.raw.dtype == torch.uint8
    assert public.digest == make_public(cfg, task, NOBODY, seed=3).digest
    assert public.digest != make_public(cfg, task, NOBODY, seed=4).digest
    torch.testing.assert_close(public[torch.arange(40)], (public.raw / 255 - 0.5) / 0.25)
    half = make_public(PublicConfig(source="generator", path=str(file), size=40, fraction=0.5), task, NOBODY, seed=3)
    assert len(half) == 20


def test_generated_images_are_converted_and_transformed_like_others(file):
    task = gray_task((3, 8, 8))
    public = make_public(PublicConfig(source="generator", path=str(file), size=9), task, NOBODY, seed=0)
    assert public.shape == (3, 8, 8)
    for options in ({"augment": ["crop"]}, {}):  # with nothing to change them, each draw makes others
        cfg = PublicConfig(source="generator", path=str(file), size=9, fresh=True, **options)
        drawn = make_public(cfg, task, NOBODY, seed=0)
        assert drawn.fresh
        assert torch.equal(drawn[torch.arange(9)], public[torch.arange(9)])
        assert torch.equal(drawn.draw(torch.arange(9), 1), drawn.draw(torch.arange(9), 1))
        assert not torch.equal(drawn.draw(torch.arange(9), 1), drawn.draw(torch.arange(9), 2))


def test_a_scenario_gives_the_clients_all_samples(file):
    scenario = Scenario(gray_task(), ["mlp"], public=PublicConfig(source="generator", path=str(file), size=5))
    assert len(scenario.server.public) == 5
    assert int(scenario.roster.sizes.sum()) == 30


def test_the_path_in_a_configuration_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tables = {"method": {"name": "feddf"}, "public": {"source": "generator", "path": "g.safetensors", "size": 5}}
    assert load_config(tables).public.path == str(tmp_path / "g.safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 5}, "needs public.path"),
        ({"path": "g.safetensors"}, "public.size = None: set public.size"),
        ({"path": "g.safetensors", "size": 5, "labels": True}, "has no classes"),
    ],
)
def test_incomplete_settings(options, message):
    with pytest.raises(ConfigError, match=message):
        make_public(PublicConfig(source="generator", **options), gray_task(), NOBODY, seed=0)


def header(blob: bytes, **changes) -> bytes:
    """The file with other settings in its header."""
    (n,) = struct.unpack("<Q", blob[:8])
    head = json.loads(blob[8 : 8 + n])
    head["__metadata__"] |= changes
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + blob[8 + n :]


def test_files_that_are_no_generator_are_refused(file, tmp_path):
    good, bad = file.read_bytes(), tmp_path / "bad.safetensors"
    weights = safetensors.torch.load(good)
    about = {"format": FORMAT, "channels": "1", "height": "10", "width": "14", "latent": "6", "features": "4"}
    less = {n: t for n, t in weights.items() if n != "grow.0.weight"}
    for blob, message in (
        (b"", "cannot read"),
        (b"not a file of tensors", "cannot read"),
        (good[:-10], "cannot read"),
        (safetensors.torch.save({"w": torch.ones(1)}), "is not a generator"),
        (header(good, format="other"), "is not a generator: its format is 'other'"),
        (header(good, latent="-5"), "latent = '-5' is not an integer"),
        (header(good, features="9" * 30), "not an integer"),
        (header(good, features="9999999"), "features = 9999999: expected 1 to 1024"),
        (header(good, height="0"), "height = 0"),
        (header(good, features="1024", latent="4096"), "dense.0.weight is"),
        (safetensors.torch.save(less, about), "grow.0.weight"),
        (safetensors.torch.save(weights | {"dense.0.weight": weights["dense.0.weight"].double()}, about), "dense.0"),
    ):
        bad.write_bytes(blob)
        with pytest.raises(DataError, match=message):
            load_generator(bad)
    with pytest.raises(DataError, match=r"cannot read the generator .*scripts/train_generator.py writes one"):
        load_generator(tmp_path / "absent.safetensors")


# ---- the script that trains one --------------------------------------------------------------------


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_generator", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_trains_on_images_no_client_holds(script):
    whole, part = load("fashion-mnist"), load("fashion-mnist", train_size=9990, seed=5)
    left = script.leftover(whole.train.labels, 9990, seed=5)
    assert len(left) == 10
    kept = torch.ones(len(whole.train), dtype=torch.bool)
    kept[left] = False
    assert torch.equal(whole.train.inputs[kept], part.train.inputs)
    assert len(script.leftover(whole.train.labels, 0, seed=5)) == 10_000


def test_the_script_writes_a_file_that_can_be_used(script, tmp_path, capsys):
    out = tmp_path / "g.safetensors"
    script.main(["--steps", "2", "--batch", "4", "--features", "2", "--latent", "8", "--out", str(out)])
    assert "2000 images of fashion-mnist" in capsys.readouterr().out
    made = load_generator(out)(torch.randn(4, 8))
    assert made.shape == (4, 1, 28, 28)
    assert bool(torch.isfinite(made).all())
    with pytest.raises(SystemExit, match="must be at least 0 and below"):
        script.main(["--federated", "10000"])


def test_training_moves_the_images_towards_the_data(script):
    """All images are bright on the left: so are, on average, those of a generator trained on them for a moment."""
    images = torch.zeros(64, 1, 8, 8, dtype=torch.uint8)
    images[..., :4] = 255
    made = script.train(images, latent=4, features=4, steps=120, batch=16, seed=0)(torch.randn(64, 4))
    assert made[..., :4].mean() > made[..., 4:].mean() + 0.2
