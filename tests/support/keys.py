"""Keys to sign manifests with."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec


def write_keys(private: Path, public: Path) -> None:
    """Writes a new private key on the curve P-256, not encrypted, and its public one, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    private.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo))
