"""Signs a manifest with a private key, and says whether a signature beside one is that of a public key.

A signature is a file of the OpenSSF Model Signing format (https://github.com/ossf/model-signing-spec) over one file,
the manifest, whose digests stand for tensors and side files. The library `model-signing` makes and judges it, and its
own command does so too: `model_signing verify key ckptkit.json --signature ckptkit.json.sig --public_key KEY`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ckptkit.core import json_text
from ckptkit.core.errors import CkptkitError, MissingDependencyError, words_of
from ckptkit.formats.detect import SIGNATURE_ENDING
from ckptkit.storage.regular import read_regular
from ckptkit.storage.whole import write_whole

_MAX_KEY = 1 << 16  # bytes of a key in PEM, which has some hundred
_MAX_SIGNATURE = 1 << 20  # bytes: that of one file has about 2000
_PRIVATE = "make one: `openssl ecparam -name prime256v1 -genkey -noout -out KEY`; an encrypted one is not read"
_PUBLIC = "name what `openssl ec -in PRIVATE -pubout` wrote"


def signature_of(manifest: Path) -> Path:
    """Where the signature of a manifest lies: beside it, as `ckptkit.json.sig`."""
    return manifest.with_name(manifest.name + SIGNATURE_ENDING)


def signer(private_key: Path) -> Any:
    """A `model_signing.signing.Config` with an elliptic curve key in PEM (P-256, P-384 or P-521, not encrypted).

    Raises CkptkitError where it is none, and where the library is missing.
    """
    signing, _ = _library()
    return _with_key(signing.Config().use_elliptic_key_signer, "private_key", private_key, _PRIVATE)


def verifier(public_key: Path) -> Any:
    """A `model_signing.verifying.Config` with the public key in PEM. Raises CkptkitError as `signer`."""
    _, verifying = _library()
    return _with_key(verifying.Config().use_elliptic_key_verifier, "public_key", public_key, _PUBLIC)


def _library() -> tuple[Any, Any]:
    try:
        from model_signing import signing, verifying
    except ImportError as error:
        missing = f"signatures need the library model-signing, which cannot be imported ({words_of(error)})"
        raise MissingDependencyError(missing, "pip install model-signing pyopenssl") from error
    return signing, verifying


def _with_key(configured: Callable[..., Any], name: str, path: Path, hint: str) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        read_regular(path, _MAX_KEY)  # the library opens it without looking at what it is
        return configured(**{name: path})
    except OSError as error:
        raise CkptkitError(f"{path}: {error.strerror}", "name the file of the key with --key") from error
    except (ValueError, TypeError, AttributeError, UnsupportedAlgorithm) as error:
        # TypeError: it is encrypted. AttributeError: a key of another kind (RSA) has no curve.
        what = name.replace("_", " ")
        raise CkptkitError(
            f"{path} is not a {what} on the curve P-256, P-384 or P-521: {words_of(error)}", hint
        ) from error


def refuse_signed(manifest: Path) -> None:
    """Raises CkptkitError where a manifest has a signature, which would be replaced."""
    target = signature_of(manifest)
    if os.path.lexists(target):
        raise CkptkitError(f"{target} exists already", "move it away to sign the manifest again")


def sign_manifest(manifest: Path, by: Any) -> Path:
    """Signs a manifest with what `signer` made. Returns the path of the signature. Raises as `refuse_signed`."""
    refuse_signed(manifest)
    with TemporaryDirectory() as folder:
        made = Path(folder, "signature")
        by.sign(manifest.resolve(), made)  # the library signs no links
        write_whole(signature_of(manifest), made.read_text("utf-8"))
    return signature_of(manifest)


def signature_fault(manifest: Path, by: Any) -> str | None:
    """Why the signature beside a manifest is none of it by the key in `by` (from `verifier`); None where it is one.

    Raises CkptkitError where the manifest cannot be read.
    """
    from cryptography.exceptions import InvalidSignature

    path = signature_of(manifest)
    try:
        content = read_regular(manifest, json_text.MAX_BYTES)
    except OSError as error:
        raise CkptkitError(f"{manifest}: {error.strerror}", "write one with `ckptkit manifest`") from error
    try:
        signed = _signed(read_regular(path, _MAX_SIGNATURE))
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except (ValueError, LookupError, TypeError):
        return "it is not a signature in the format of OpenSSF Model Signing"
    if [one.get("name") for one in signed] != ["."]:
        return "it signs other files than this manifest alone"
    if signed[0].get("algorithm") == "sha256" and signed[0].get("digest") != hashlib.sha256(content).hexdigest():
        return "it signs another manifest, or this one was changed"
    try:
        by.verify(manifest.resolve(), path.resolve())
    except InvalidSignature:
        return "it was made with another key, or changed"
    except ValueError as error:
        return words_of(error)
    return None


def _signed(signature: bytes) -> list[dict[str, Any]]:
    """What a signature says that it signs: name, algorithm and digest of each file.

    Raises ValueError, LookupError or TypeError where it is none, or lacks what the library takes for granted.
    """
    bundle = json_text.parse(signature)
    envelope = bundle["dsseEnvelope"]
    # Older ones have no hint of their key, about which the library prints a warning.
    texts = (bundle["verificationMaterial"]["publicKey"]["hint"], envelope["signatures"][0]["sig"])
    payload = json.loads(base64.b64decode(envelope["payload"], validate=True))
    resources = payload["predicate"]["resources"]
    if not all(isinstance(one, str) for one in texts) or not all(isinstance(one, dict) for one in resources):
        raise TypeError("not a signature")
    return list(resources)
