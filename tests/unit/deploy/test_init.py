"""`solera deploy init`: what the folders of a deployment hold, and what they do not."""

import os
import pathlib
import tomllib

import pytest
import tomli_w
from typer.testing import CliRunner

from deployments import CODE, DIFFERENT, SITES, config_of
from solera.cli.main import app
from solera.core.errors import ConfigError
from solera.core.plugins import code_allowed
from solera.deploy.gate import check_app
from solera.deploy.init import init, renew
from solera.deploy.keys import expiry, fingerprint
from solera.runs.config import load_config
from text_sites import text_sites, write_tables

METHOD = 'name = "feddf"\n[method.fusion]\nsteps = 3'


@pytest.fixture
def config(tmp_path):
    (tmp_path / "own.py").write_text(CODE)
    file = tmp_path / "federation.toml"
    file.write_text(config_of(METHOD, DIFFERENT, rounds=3))
    return file


def table(file):
    return tomllib.loads(file.read_text())


def test_each_party_gets_its_own_and_nothing_else(config, tmp_path):
    out = tmp_path / "d"
    assert sorted(init(config, out, "10.0.0.5:8000", ["fl.example"])) == sorted(SITES)
    server = table(out / "server" / "server.toml")
    assert server["engine"]["name"] == "flower"
    assert server["engine"]["address"] == "10.0.0.5:8000"
    assert server["sites"]["east"] == {"model": "own.py:split_wide", "key": "keys/east.pub"}
    for site in SITES:
        folder = out / "sites" / site
        assert sorted(os.listdir(folder)) == ["ca.crt", "deploy.toml", "node.key", "node.pub", "own.py", "site.toml"]
        assert list(table(folder / "site.toml")["sites"]) == [site]
        assert table(folder / "site.toml")["method"] == {"name": "feddf"}
        assert table(folder / "deploy.toml") == {"role": "site", "name": site, "address": "10.0.0.5:8000"}
        assert (folder / "node.pub").read_text() == (out / "server" / "keys" / f"{site}.pub").read_text()
    keys = {fingerprint((out / "sites" / s / "node.pub").read_bytes(), s) for s in SITES}
    assert len(keys) == len(SITES)
    held = {p.name for p in (out / "server").rglob("*")}
    assert "ca.key" not in held
    assert "node.key" not in held


def test_all_parties_are_portable_or_none(config, tmp_path):
    init(config, tmp_path / "a", "127.0.0.1:8000")
    tables = tomllib.loads(config.read_text())
    config.write_text(tomli_w.dumps({**tables, "engine": {**tables.get("engine", {}), "portable": True}}))
    init(config, tmp_path / "b", "127.0.0.1:8000")
    for name in ("server/server.toml", *(f"sites/{site}/site.toml" for site in SITES)):
        assert "portable" not in table(tmp_path / "a" / name).get("engine", {})
        assert table(tmp_path / "b" / name)["engine"]["portable"] is True


def test_private_folders_and_keys_are_their_owners(config, tmp_path):
    init(config, tmp_path / "d", "127.0.0.1:8000")
    for path in (tmp_path / "d").rglob("*"):
        if (path.name in ("ca", "server", *SITES) and path.is_dir()) or path.suffix == ".key" or path.name == "secret":
            assert path.stat().st_mode & 0o077 == 0, path


def test_both_halves_are_configurations_that_load(config, tmp_path):
    out = tmp_path / "d"
    init(config, out, "127.0.0.1:8000")
    with code_allowed(out / "server"):
        assert set(load_config(out / "server" / "server.toml").sites) == set(SITES)
    with code_allowed(out / "sites" / "west"):
        assert set(load_config(out / "sites" / "west" / "site.toml").sites) == {"west"}


def test_the_app_holds_no_code(config, tmp_path):
    from flwr.cli.build import build_fab_from_disk

    init(config, tmp_path / "d", "127.0.0.1:8000")
    folder = tmp_path / "d" / "server" / "app"
    assert os.listdir(folder) == ["pyproject.toml"]
    check_app(build_fab_from_disk(folder))


def test_units_and_a_compose_file(config, tmp_path):
    init(config, tmp_path / "d", "0.0.0.0:8000", ["fl.example"], systemd=True, compose=True)
    unit = (tmp_path / "d" / "server" / "solera-server.service").read_text()
    assert f"deploy server {tmp_path / 'd' / 'server'}" in unit
    assert "NoNewPrivileges=true" in unit
    assert "deploy client" in (tmp_path / "d" / "sites" / "east" / "solera-site.service").read_text()
    compose = (tmp_path / "d" / "compose.yaml").read_text()
    assert '"/deployment", "--address", "0.0.0.0:8000", "--behind-firewall"' in compose
    assert compose.count('"--server", "server:8000"') == 3
    assert table(tmp_path / "d" / "sites" / "east" / "deploy.toml")["address"] == "fl.example:8000"


def test_behind_a_proxy_sites_are_told_its_address_and_its_name_is_in_the_certificate(config, tmp_path):
    from cryptography import x509

    out = tmp_path / "d"
    assert said_by("init", config, "-o", out, "--address", "10.0.0.5:8000", "--proxy", "fl.example:443")[0] == 0
    assert table(out / "sites" / "east" / "deploy.toml")["address"] == "fl.example:443"
    assert table(out / "server" / "deploy.toml") == {
        "role": "server", "address": "10.0.0.5:8000", "proxy": "fl.example:443",
    }  # fmt: skip
    certificate = x509.load_pem_x509_certificate((out / "server" / "server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"fl.example", "localhost"}


def test_an_address_that_others_reach_needs_a_word_on_what_keeps_them_away(config, tmp_path):
    code, text = said_by("init", config, "-o", tmp_path / "a", "--address", "10.0.0.5:8000")
    assert code == 2
    assert "has no login" in text
    assert not (tmp_path / "a").exists()
    assert said_by("init", config, "-o", tmp_path / "b", "--address", "10.0.0.5:8000", "--behind-firewall")[0] == 0
    assert table(tmp_path / "b" / "server" / "deploy.toml")["behind_firewall"] is True


def test_keys_are_never_overwritten(config, tmp_path):
    init(config, tmp_path / "d", "127.0.0.1:8000")
    with pytest.raises(ConfigError, match="keys are never overwritten"):
        init(config, tmp_path / "d", "127.0.0.1:8000")


def test_a_renewed_certificate_is_for_the_same_names(config, tmp_path):
    from cryptography import x509

    init(config, tmp_path / "d", "10.0.0.5:8000", ["fl.example"])
    file = tmp_path / "d" / "server" / "server.crt"
    old = file.read_bytes()
    assert renew(tmp_path / "d") == expiry(file).date().isoformat()
    assert file.read_bytes() != old
    names = x509.load_pem_x509_certificate(file.read_bytes()).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert set(names.value.get_values_for_type(x509.DNSName)) == {"fl.example", "localhost"}
    with pytest.raises(ConfigError, match="renew where the deployment was made"):
        renew(tmp_path / "d" / "server")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("[sites.east]", "[sites.East]"), "only lower-case letters"),
        (("own.py:split_wide", "other.py:x"), "other.py"),
        (("rounds = 3", "rounds = 0"), "run.rounds"),
        (('name = "feddf"', 'name = "fedfd"'), "did you mean"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(config, tmp_path, change, said):
    config.write_text(config.read_text().replace(*change))
    with pytest.raises(ConfigError, match=said):
        init(config, tmp_path / "d", "127.0.0.1:8000")
    assert not (tmp_path / "d").exists()


def test_without_sites_there_is_nothing_to_deploy(tmp_path):
    (tmp_path / "a.toml").write_text('[method]\nname = "fedavg"')
    with pytest.raises(ConfigError, match="names no sites"):
        init(tmp_path / "a.toml", tmp_path / "d", "127.0.0.1:8000")


def said_by(*words):
    result = CliRunner().invoke(app, ["deploy", *map(str, words)])
    return result.exit_code, " ".join((result.output + (result.stderr or "")).split())


def test_commands_refuse_the_wrong_folder_in_one_line(config, tmp_path):
    out = tmp_path / "d"
    init(config, out, "127.0.0.1:8000")
    for words, said in [
        (("server", out), "there is no deploy.toml in it"),
        (("server", out / "sites" / "east"), "is the folder of a 'site', not of a server"),
        (("client", out / "server"), "is the folder of a 'server', not of a site"),
        (("submit", out / "server", "--name", "../x"), "only lower-case letters"),
        (("submit", out / "server", "--config", "../x.toml"), "there is no such file"),
        (("logs", out), "there is no deploy.toml in it"),
        (("server", out / "server", "--insecure", "--address", "0.0.0.0:8000"), "only on the loopback interface"),
        (("client", out / "sites" / "east", "--insecure", "--server", "10.0.0.5:8000"), "only on the loopback"),
    ]:
        code, text = said_by(*words)
        assert code == 2, (words, text)
        assert said in text, (words, text)


def test_an_expired_certificate_is_not_served(config, tmp_path):
    from solera.deploy.keys import make_server_certificate

    out: pathlib.Path = tmp_path / "d"
    init(config, out, "127.0.0.1:8000")
    for name in ("server.key", "server.crt"):
        (out / "server" / name).unlink()
    make_server_certificate(out / "ca", out / "server", ["127.0.0.1"], until=-1.0)
    code, text = said_by("server", out / "server")
    assert code == 2
    assert "has expired: renew it with `solera deploy renew`" in text


def test_an_encoder_goes_to_the_parties_that_need_it_without_what_is_never_read(tmp_path):
    pytest.importorskip("transformers", reason="needs the extra text")
    tables = text_sites(tmp_path, {"name": "fusionlarge"})
    (tmp_path / "encoder" / "pytorch_model.bin").write_bytes(b"a pickle")
    (tmp_path / "encoder" / "modeling.py").write_text("print('code')")
    init(write_tables(tmp_path / "f.toml", tables), tmp_path / "d", "127.0.0.1:8000")
    held = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(os.listdir(tmp_path / "d" / "server" / "encoder")) == held
    assert sorted(os.listdir(tmp_path / "d" / "sites" / "east" / "encoder")) == held
    assert not (tmp_path / "d" / "sites" / "north" / "encoder").exists()
    with code_allowed(tmp_path / "d"):
        config = load_config(tmp_path / "d" / "sites" / "east" / "site.toml")
    assert config.sites["east"].model == f"hf:{tmp_path}/d/sites/east/encoder"


def test_an_encoder_outside_of_the_folder_of_the_configuration_is_refused(tmp_path):
    pytest.importorskip("transformers", reason="needs the extra text")
    tables = text_sites(tmp_path, {"name": "fusionlarge"})
    tables["sites"]["east"]["model"] = "hf:../encoder"
    home = tmp_path / "inner"
    home.mkdir()
    (home / "own.py").write_text((tmp_path / "own.py").read_text())
    with pytest.raises(ConfigError, match=r"'hf:\.\./encoder': put the encoder into a folder beside"):
        init(write_tables(home / "f.toml", tables), home / "d", "127.0.0.1:8000")


def test_a_site_gets_the_options_of_its_own_model_alone(tmp_path):
    pytest.importorskip("transformers", reason="needs the extra text")
    tables = text_sites(tmp_path, {"name": "fusionlarge"})
    tables["models"]["options"]["small"] = {"model": "lstm", "hidden": 4}
    tables["sites"]["north"]["model"] = "small"
    init(write_tables(tmp_path / "f.toml", tables), tmp_path / "d", "127.0.0.1:8000")
    options = {k: table(tmp_path / "d" / "sites" / k / "site.toml")["models"].get("options") for k in SITES}
    assert options == {"east": None, "north": {"small": {"model": "lstm", "hidden": 4}}, "west": None}
    assert set(table(tmp_path / "d" / "server" / "server.toml")["models"]["options"]) == {
        "lstm",
        "small",
        "transformer",
    }
    for k in SITES:
        with code_allowed(tmp_path / "d"):
            load_config(tmp_path / "d" / "sites" / k / "site.toml")


def test_a_site_is_told_the_heads_that_all_models_need(tmp_path):
    """Fed-ET needs shared heads where models differ, which a site that knows one model cannot see."""
    pytest.importorskip("transformers", reason="needs the extra text")
    tables = text_sites(tmp_path, {"name": "fedet"})
    del tables["sites"]["west"]  # its model is not split
    init(write_tables(tmp_path / "f.toml", tables), tmp_path / "d", "127.0.0.1:8000")
    assert {table(f)["models"]["head"] for f in (tmp_path / "d").rglob("s*.toml")} == {"shared"}
