"""Certificates and keys: what they are valid for, and who can read them."""

import datetime
import ssl
import subprocess

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from solera.core.errors import ConfigError
from solera.deploy.keys import (
    expiry,
    fingerprint,
    make_authority,
    make_node_key,
    make_secret,
    make_server_certificate,
)


@pytest.fixture
def made(tmp_path):
    (tmp_path / "ca").mkdir()
    make_authority(tmp_path / "ca")
    make_server_certificate(tmp_path / "ca", tmp_path, ["server.example", "127.0.0.1"])
    return tmp_path


def test_the_certificate_is_signed_by_the_authority_and_valid_for_the_names(made):
    ca = x509.load_pem_x509_certificate((made / "ca" / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((made / "server.crt").read_bytes())
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server.example"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    left = expiry(made / "server.crt") - datetime.datetime.now(datetime.UTC)
    assert 396 <= left.days <= 397


def shake_hands(server_folder, ca_file, name):
    """A TLS handshake in memory, with Python's own library: None, or the client's complaint."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(server_folder / "server.crt", server_folder / "server.key")
    client = ssl.create_default_context(cafile=str(ca_file))
    a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(a, b, server_hostname=name)
    far = server.wrap_bio(b, a, server_side=True)
    done = set()
    for _ in range(10):
        for side in (near, far):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError as e:
                return e.verify_message
        if len(done) == 2:
            return None
    raise AssertionError("no end of it")


def test_who_trusts_the_authority_trusts_the_server_and_nobody_else(made, tmp_path):
    assert shake_hands(made, made / "ca" / "ca.crt", "127.0.0.1") is None
    assert shake_hands(made, made / "ca" / "ca.crt", "server.example") is None
    assert "mismatch" in shake_hands(made, made / "ca" / "ca.crt", "other.example")
    (tmp_path / "other").mkdir()
    make_authority(tmp_path / "other")
    assert "unable to get local issuer" in shake_hands(made, tmp_path / "other" / "ca.crt", "127.0.0.1")


def test_an_expired_certificate_is_refused(made, tmp_path):
    (tmp_path / "old").mkdir()
    make_server_certificate(made / "ca", tmp_path / "old", ["127.0.0.1"], until=-1.0)
    assert "expired" in shake_hands(tmp_path / "old", made / "ca" / "ca.crt", "127.0.0.1")


def test_private_files_are_their_owners_and_are_never_overwritten(made, tmp_path):
    make_secret(tmp_path / "secret")
    make_node_key(tmp_path, "site")
    for file in (made / "ca" / "ca.key", made / "server.key", tmp_path / "secret", tmp_path / "node.key"):
        assert file.stat().st_mode & 0o777 == 0o600, file
    with pytest.raises(FileExistsError):
        make_node_key(tmp_path, "site")


def test_a_site_is_known_by_its_key_in_every_form(tmp_path):
    make_node_key(tmp_path, "hospital-a")
    ssh = (tmp_path / "node.pub").read_bytes()
    assert ssh.endswith(b" hospital-a\n")
    key = serialization.load_ssh_public_key(ssh)
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert fingerprint(ssh, "a") == fingerprint(pem, "b")
    private = serialization.load_ssh_private_key((tmp_path / "node.key").read_bytes(), None)
    assert private.public_key() == key


def test_the_key_is_one_that_ssh_reads(tmp_path):
    make_node_key(tmp_path, "site")
    try:
        out = subprocess.run(["ssh-keygen", "-y", "-f", tmp_path / "node.key"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("ssh-keygen is not installed")
    assert out.stdout.split()[:2] == (tmp_path / "node.pub").read_text().split()[:2]


@pytest.mark.parametrize("text", [b"", b"nonsense", b"-----BEGIN PUBLIC KEY-----\nxx\n-----END PUBLIC KEY-----\n"])
def test_what_is_no_key_is_refused_with_its_place(text):
    with pytest.raises(ConfigError, match=r"keys/a\.pub is not the public key of a site"):
        fingerprint(text, "keys/a.pub")
