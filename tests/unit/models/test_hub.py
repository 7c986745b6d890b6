"""Encoders of the hub, from a stand-in of it on loopback: what is asked for, kept, recorded and refused."""

import hashlib
import json
import socket

import pytest
import tomli_w
import torch

import fresh
from encoders import write_encoder
from hubs import files_of, loopback_hub
from solera.core.errors import ConfigError, RunError
from solera.models import build, encoding_of
from solera.models.hf import encoding, origins_of
from solera.runs import loop

pytest.importorskip("transformers", reason="needs the extra text")

FILES = """
import hashlib, json, logging, sys
logging.basicConfig(format="%(message)s")
from solera.models.hub import Repository
repository = Repository(sys.argv[1], "hf:" + sys.argv[1])
folder = repository.folder()
if len(sys.argv) > 2:
    repository.fetch_weights(folder)
files = [f for f in folder.rglob("*") if f.is_file()]
found = {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
print(json.dumps([folder.name, found]))
"""
RUNS = """
import sys, time
from solera.cli.main import app
time.sleep = lambda seconds: None  # the library waits before it tries again
for name in sys.argv[2:]:
    try:
        app(["run", sys.argv[1], "--set", f'models.clients=["{name}"]'], prog_name="solera")
    except SystemExit as e:
        print("exit", e.code, file=sys.stderr)
"""
UNUSED = {
    "pytorch_model.bin": b"a pickle", "modeling.py": b"import os", "tf_model.h5": b"h", "onnx/model.onnx": b"o",
    "onnx/config.json": b"{}", "openvino/model.safetensors": b"s", "model.fp16.safetensors": b"s",
    "1_Pooling/pytorch_model.bin": b"a pickle", "README.md": b"#",
}  # fmt: skip
SMALL = ["1_Pooling/config.json", "config.json", "tokenizer.json", "tokenizer_config.json"]
TABLES = {
    "run": {"rounds": 1},
    "data": {"name": "toy-text", "length": 12, "train_size": 40, "test_size": 8},
    "partition": {"kind": "iid", "clients": 2},
    "models": {"clients": []},
    "method": {"name": "fedavg", "local": {"steps": 1, "batch": 8, "lr": 0.05}},
    "engine": {"name": "processes", "workers": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose features are the mean over its tokens."""
    made = write_encoder(tmp_path_factory.mktemp("hf") / "tiny")
    (made / "1_Pooling").mkdir()
    (made / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return made


@pytest.fixture(scope="module")
def encoder(folder):
    """The files of its repository."""
    return files_of(folder)


@pytest.fixture
def hub():
    with loopback_hub() as made:
        yield made


@pytest.fixture
def cut_off(monkeypatch, tmp_path):
    """This process has the cache in `tmp_path`, and connects to nobody. Whom it tries to."""
    from huggingface_hub import constants

    tried = []

    def connect(_, address):
        tried.append(address)
        raise OSError("no network")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket.socket, "connect", connect)
    encoding.cache_clear()
    yield tried
    encoding.cache_clear()


def result(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def sha(content):
    return hashlib.sha256(content).hexdigest()


def origin(name, **options):
    (found,) = origins_of(build(name, 2, (16,), vocabulary=encoding_of(name).vocabulary, **options))
    return found


# ---- what is fetched ----------------------------------------------------------------------------------------


def test_the_first_use_fetches_what_is_needed_and_the_second_asks_nobody(hub, encoder, folder, tmp_path, cut_off):
    commit = hub.put("me/tiny", {**encoder, **UNUSED})
    first = fresh.run("-c", FILES, "me/tiny", "weights", env=hub.env(tmp_path))
    assert result(first) == [commit, {f: sha(content) for f, content in encoder.items()}]
    assert hub.got() == [*SMALL[:2], "model.safetensors", *SMALL[2:]]
    small, large = sum(len(encoder[f]) for f in SMALL) / 1e6, len(encoder["model.safetensors"]) / 1e6
    assert first.stderr.splitlines() == [  # and no progress bars, which are for terminals
        f"fetching the configuration and tokenizer of hf:me/tiny from the hub ({small:.1f} MB)",
        f"fetching the weights of hf:me/tiny from the hub ({large:.1f} MB)",
    ]
    hub.asked.clear()
    gone = hub.env(tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    for env in (hub.env(tmp_path), gone, {**gone, "HF_HUB_OFFLINE": "1"}):
        second = fresh.run("-c", FILES, "me/tiny", "weights", env=env)
        assert (result(second), second.stderr, hub.asked) == (result(first), "", [])
    told = {"model": "hf:me/tiny", "weights": "pretrained", "commit": commit}
    assert origin("hf:me/tiny") == {**told, "digest": origin(f"hf:{folder}")["digest"]}
    assert cut_off == []


def test_random_weights_need_no_weights(hub, encoder, tmp_path, cut_off):
    commit = hub.put("me/tiny", encoder)
    assert set(result(fresh.run("-c", FILES, "me/tiny", env=hub.env(tmp_path)))[1]) == set(hub.got()) == set(SMALL)
    assert origin("hf:me/tiny", weights="random") == {"model": "hf:me/tiny", "weights": "random", "commit": commit}
    with torch.device("meta"):  # nor does who only counts parameters
        build("hf:me/tiny", 2, (16,), vocabulary=60)
    assert cut_off == []
    with pytest.raises(ConfigError, match="cannot be fetched"):
        origin("hf:me/tiny")


def test_weights_are_of_the_commit_of_the_tokenizer(hub, encoder, tmp_path):
    """Even if the hub has moved on in between."""
    old = hub.put("me/tiny", encoder)
    assert result(fresh.run("-c", FILES, "me/tiny", env=hub.env(tmp_path)))[0] == old
    newer = {**encoder, "model.safetensors": b"newer", "tokenizer.json": b"newer"}
    new = hub.put("me/tiny", newer)
    name, found = result(fresh.run("-c", FILES, "me/tiny", "weights", env=hub.env(tmp_path)))
    assert (name, found) == (old, {f: sha(content) for f, content in encoder.items()})
    name, found = result(fresh.run("-c", FILES, "me/tiny", "weights", env=hub.env(tmp_path / "another")))
    assert (name, found) == (new, {f: sha(content) for f, content in newer.items()})


def test_a_revision_is_a_commit_or_a_name(hub, encoder, tmp_path):
    first = hub.put("me/tiny", encoder)
    hub.put("me/tiny", {"config.json": b"{}", "model.safetensors": b"of main"})
    asked = {"config.json": b"{}", "model.safetensors": b"of a pull request"}
    pull = hub.put("me/tiny", asked, revision="refs/pr/1")
    for revision, commit, files in ((first, first, encoder), ("refs/pr/1", pull, asked)):
        for _ in range(2):
            name, found = result(fresh.run("-c", FILES, f"me/tiny@{revision}", "weights", env=hub.env(tmp_path)))
            assert (name, found) == (commit, {f: sha(content) for f, content in files.items()})
        assert hub.asked
        hub.asked.clear()


def test_weights_in_parts_and_a_repository_that_has_moved(hub, tmp_path):
    """`distilbert-base-uncased` and others without an owner are at another place today."""
    parts = {f"model-0000{i}-of-00002.safetensors": bytes([i]) for i in (1, 2)}
    files = {"config.json": b"{}", "vocab.txt": b"a", "model.safetensors.index.json": b"{}", **parts}
    hub.put("owner/tiny", files)
    hub.moved["tiny"] = "owner/tiny"
    _, found = result(fresh.run("-c", FILES, "tiny", "weights", env=hub.env(tmp_path)))
    assert found == {f: sha(content) for f, content in files.items()}


def test_what_another_program_left_in_the_cache_is_completed(hub, encoder, tmp_path):
    """It may have fetched single files, without 1_Pooling, which says what the features are."""
    hub.put("me/tiny", encoder)
    other = "from huggingface_hub import hf_hub_download as get\n"
    other += "for file in ('config.json', 'tokenizer.json', 'model.safetensors'): get('me/tiny', file)"
    assert fresh.run("-c", other, env=hub.env(tmp_path)).returncode == 0
    apart = fresh.run("-c", FILES, "me/tiny", "weights", env=hub.env(tmp_path, HF_HUB_OFFLINE="1"))
    assert set(result(apart)[1]) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert "used as another program left it in the cache, perhaps without all files" in apart.stderr
    whole = fresh.run("-c", FILES, "me/tiny", "weights", env=hub.env(tmp_path))
    assert set(result(whole)[1]) == set(encoder)


def test_a_cut_is_mended(hub, encoder, tmp_path):
    hub.put("me/tiny", encoder)
    hub.cut["me/tiny/model.safetensors"], hub.cuts = 1000, 1
    _, found = result(fresh.run("-c", FILES, "me/tiny", "weights", env=hub.env(tmp_path)))
    assert found["model.safetensors"] == sha(encoder["model.safetensors"])
    assert hub.cuts == 0


# ---- what is recorded ---------------------------------------------------------------------------------------


def test_a_run_records_the_commit_and_its_workers_fetch_nothing(hub, encoder, tmp_path, cut_off):
    commit = hub.put("me/tiny", encoder)
    tables = {**TABLES, "models": {"clients": ["hf:me/tiny"]}, "run": {"rounds": 2}}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(tables))
    run = ("-m", "solera.cli.main", "run", tmp_path / "run.toml", "--out", tmp_path / "run")
    done = fresh.run(*run, env=hub.env(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    fetched = [path for method, path in hub.asked if method == "GET" and "/api/" not in path]
    assert len(fetched) == len(set(fetched)) == len(encoder)
    assert "warning: fetching the weights of hf:me/tiny from the hub" in done.stdout
    told = json.loads((tmp_path / "run" / "run.json").read_text())["experiment"]["weights"]["tiny"]
    assert (told["commit"], len(told["digest"])) == (commit, 16)

    another = hub.put("me/tiny", {**encoder, "README.md": b"new words"})
    result(fresh.run("-c", FILES, "me/tiny", "weights", env=hub.env(tmp_path)))
    with pytest.raises(RunError, match=f"was started with weights.tiny.commit = {commit}, not {another}"):
        loop.resume(tmp_path / "run")


# ---- what is refused ----------------------------------------------------------------------------------------

REFUSED = {
    "me/nothing": "the hub has no repository me/nothing, or it is private; check the name, or log in",
    "me/gated": "the owner of me/gated gives access on request; ask for it on its page of the hub, then log in",
    "me/gated-too": "the owner of me/gated-too gives access on request",
    "me/forbidden": "the hub answers with status 403; try again later, or log in",
    "me/ill": "the hub answers with status 503; try again later",
    "me/good@v9": "me/good has no revision 'v9'; check what follows the @",
    "me/cut": "the connection to the hub failed (RemoteProtocolError); try again",
    "me/longer": "OSError: Consistency check failed: file should be of size",
    "me/pickles": "only pytorch_model.bin, a pickle, which can run code and is never opened; look for them in its "
    "pull requests on the hub (hf:me/pickles@refs/pr/1), save it as model.safetensors",
    "me/empty": "has no tokenizer that can be read",
    "me/mute": "has no tokenizer that can be read",
    "me/kindless": "has no config.json",
    "me/evil": "ValueError: Invalid filename '1/../../../../x.json'",
    "me/a/b": "HFValidationError: Repo id must be in the form",
}


@pytest.fixture(scope="module")
def refusals(encoder, tmp_path_factory):
    """What is said of each, in the order of REFUSED; all of them by one process."""
    home = tmp_path_factory.mktemp("outer") / "home" / "cache"
    without = {f: {k: v for k, v in encoder.items() if k != f} for f in encoder}
    with loopback_hub() as hub:
        for name in ("me/good", "me/cut", "me/longer"):
            hub.put(name, encoder)
        hub.put("me/pickles", {**without["model.safetensors"], "pytorch_model.bin": b"a pickle"})
        hub.put("me/empty", {"README.md": b"#"})
        hub.put("me/mute", without["tokenizer.json"])
        hub.put("me/kindless", without["config.json"])
        hub.put("me/evil", {"../../../../x.json": b"{}", "1/../../../../x.json": b"{}", **encoder})
        hub.refused = {"me/gated": (401, "GatedRepo"), "me/gated-too": (403, "GatedRepo"), "me/ill": (503, "")}
        hub.refused["me/forbidden"] = (403, "")
        hub.cut["me/cut/model.safetensors"] = 1000
        hub.longer["me/longer/model.safetensors"] = 10
        (home.parent / "run.toml").parent.mkdir()
        (home.parent / "run.toml").write_text(tomli_w.dumps(TABLES))
        env = hub.env(home, HF_TOKEN="hf_secret", HF_ENDPOINT=hub.url.replace("//", "//user:secret@"))
        done = fresh.run("-c", RUNS, "run.toml", *(f"hf:{name}" for name in REFUSED), cwd=home.parent, env=env)
        asked = list(hub.asked)
    return home, done, asked


@pytest.mark.parametrize("name", REFUSED)
def test_one_line_before_any_work(refusals, name):
    home, done, _ = refusals
    said = done.stderr.splitlines()
    assert len(said) == 2 * len(REFUSED), done.stderr
    line, code = said[2 * list(REFUSED).index(name) :][:2]
    assert line.startswith(f"solera: model 'hf:{name}'")
    assert REFUSED[name] in line
    assert code == "exit 2"
    assert not (home.parent / "runs").exists()


def test_no_secret_is_said_and_nothing_is_written_outside_of_the_cache(refusals):
    home, done, asked = refusals
    assert "secret" not in done.stdout + done.stderr
    assert not list(home.parent.parent.rglob("x.json"))
    assert {p.name for p in home.parent.parent.rglob("*")} & {"run.toml", "models--me--evil"} == {
        "run.toml",
        "models--me--evil",
    }
    weights = [path for _, path in asked if path.endswith(".safetensors")]
    assert not any(name in path for path in weights for name in ("mute", "kindless", "empty", "pickles", "evil"))
    assert not any(path.endswith(".bin") for _, path in asked)


def test_a_hub_that_cannot_be_reached(hub, tmp_path):
    (tmp_path / "run.toml").write_text(tomli_w.dumps(TABLES))
    env = hub.env(tmp_path, HF_ENDPOINT="http://user:secret@127.0.0.1:9")
    for more, why in (({}, "the connection to the hub failed (ConnectError)"), ({"HF_HUB_OFFLINE": "1"}, "OFFLINE is")):
        done = fresh.run("-c", RUNS, "run.toml", "hf:me/tiny", cwd=tmp_path, env={**env, **more})
        line, code = done.stderr.splitlines()
        assert why in line
        assert "hf:./folder" in line
        assert "secret" not in line
        assert code == "exit 2"
