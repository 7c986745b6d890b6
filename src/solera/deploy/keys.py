"""TLS certificates and node keys, made with `cryptography` and readable by their owner only.

The authority signs the server's certificate; sites trust that authority and no other. Each site has a key of its own,
and the server knows a site by its public key. Nothing here is a secret format: PEM for TLS, OpenSSH for the keys.
"""

import datetime
import ipaddress
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..core.errors import ConfigError

CURVE = ec.SECP384R1()
YEARS_OF_AUTHORITY = 10
DAYS_OF_SERVER = 397  # maximum that browsers and TLS libraries accept
SKEW = datetime.timedelta(hours=1)  # clocks differ: a certificate is valid a little before it was made


def make_authority(folder: Path) -> None:
    """ca.key and ca.crt. Keep the key away from the server: it is needed only to renew the certificate."""
    key = ec.generate_private_key(CURVE)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Solera deployment")])
    now = datetime.datetime.now(datetime.UTC)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # signs certificates, only
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS_OF_AUTHORITY))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    write_private(folder / "ca.key", _pem(key))
    (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def make_server_certificate(
    authority: Path, folder: Path, names: Sequence[str], days: float = DAYS_OF_SERVER, until: float = 0.0
) -> None:
    """server.key and server.crt for the host names and addresses `names`, signed with the key in `authority`.

    It is valid for `days` days, which end `until` days from now if that is given: negative, and it has expired.
    """
    ca_key = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    ca = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(CURVE)
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=until or days)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(end - datetime.timedelta(days=days) - SKEW)
        .not_valid_after(end)
        .add_extension(x509.SubjectAlternativeName([_alternative(n) for n in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    write_private(folder / "server.key", _pem(key))
    (folder / "server.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def expiry(certificate: Path) -> datetime.datetime:
    """The end of a certificate's validity."""
    return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc


def make_node_key(folder: Path, comment: str) -> None:
    """node.key and node.pub: the identity of a site."""
    key = ec.generate_private_key(CURVE)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_private(folder / "node.key", private)
    (folder / "node.pub").write_bytes(public + f" {comment}\n".encode())


def fingerprint(public_key: bytes, where: str) -> str:
    """A public key, in OpenSSH or PEM form, in the one form in which keys are compared: the hex of its DER encoding."""
    try:
        load = (
            serialization.load_pem_public_key if public_key.startswith(b"-----") else serialization.load_ssh_public_key
        )
        key = load(public_key)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError(f"a key of type {type(key).__name__}, not of an elliptic curve")
    except (ValueError, UnsupportedAlgorithm) as e:
        raise ConfigError(f"{where} is not the public key of a site: {e}") from None
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return der.hex()


def make_secret(file: Path) -> None:
    """A random secret: the SuperLink accepts work from holders of this file only."""
    write_private(file, secrets.token_bytes(32))


def write_private(file: Path, content: bytes) -> None:
    """A new file that only its owner can read."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as f:
        f.write(content)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
