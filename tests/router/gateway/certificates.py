"""Certificates for tests, made where they are needed."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kappa_router.gateway.spec import Tls


def pair(folder: Path, name: str = "localhost", stem: str = "tls", password: str = "") -> Tls:
    """A certificate of its own for a host name and 127.0.0.1, and its key, in files."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    begins = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    tls = Tls(folder / f"{stem}.crt", folder / f"{stem}.key")
    secret = serialization.NoEncryption()
    if password:
        secret = serialization.BestAvailableEncryption(password.encode())
    tls.cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    tls.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, secret
        )
    )
    return tls
