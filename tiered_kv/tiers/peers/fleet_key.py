"""The secret that the machines of a fleet share, and what is made of it: one certificate, and a token for each hour.

Whoever reads the key may read every blob of the fleet and answer in a peer's place; blobs are verified all the same.
Owns the key's file format and both derivations. Called by the client (``peer.py``) and the door (``server/door.py``).
"""

import datetime
import hashlib
import hmac
import os
import re
import ssl
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tiered_kv.machine import read_secret

KEY_BYTES: Final = 32
HOUR_S: Final = 3600
HOURS_OFF: Final = 1
"""How far the clocks of two machines may be apart; a token is good for two to three hours."""

_HEX = re.compile(rb"[0-9a-f]{64}\s*")
_FIRST_DAY = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_LAST_DAY = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)


class FleetKey:
    """The key and what follows from it.

    Every machine derives the same Ed25519 key pair and, because these signatures are deterministic, the same
    certificate to the byte. So a client trusts exactly this certificate, and nothing but the key is distributed.

    Threads: any; immutable.
    """

    def __init__(self, key: bytes) -> None:
        """Use ``key``, 32 random bytes."""
        assert len(key) == KEY_BYTES, len(key)
        self._key = key

    @classmethod
    def read(cls, path: Path) -> "FleetKey":
        """Read a key's file: 64 hex digits, for its owner alone.

        Raises:
            ConfigError: There is none, others may read or write it, or it holds something else.
        """
        make = "make one with: (umask 077; openssl rand -hex 32 > FILE), and copy it to every machine"
        digits = read_secret(path, "setting peer_key_file", _HEX, "does not hold 64 hex digits", make)
        return cls(bytes.fromhex(digits.decode()))

    @property
    def secret(self) -> bytes:
        """The key itself, for a process of ours that is to have the same although the file may change."""
        return self._key

    def token(self, now_s: float) -> str:
        """What a question carries in this hour; ``now_s`` is the wall clock's."""
        return self._token(int(now_s // HOUR_S))

    def accepts(self, token: str, now_s: float) -> bool:
        """Whether a token is of this hour, the one before or the next one. Compares in constant time."""
        hour, given = int(now_s // HOUR_S), token.encode()
        hours = range(hour - HOURS_OFF, hour + HOURS_OFF + 1)
        return any(hmac.compare_digest(self._token(one).encode(), given) for one in hours)

    def _token(self, hour: int) -> str:
        return hmac.digest(self._key, b"tiered_kv peers: token %d" % hour, hashlib.sha256).hex()

    def client_context(self) -> ssl.SSLContext:
        """TLS that talks to whoever holds the fleet's certificate, under whatever name, and to nobody else."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate names no host: it is the key that counts
        context.load_verify_locations(cadata=self._certificate().public_bytes(serialization.Encoding.DER))
        return context

    def server_context(self) -> ssl.SSLContext:
        """TLS with the fleet's certificate; its private key is written to no disk."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        chain = self._private().private_bytes(*pem) + self._certificate().public_bytes(serialization.Encoding.PEM)
        memory = os.memfd_create("tiered_kv-certificate", os.MFD_CLOEXEC)  # OpenSSL reads certificates from files only
        try:
            os.write(memory, chain)
            context.load_cert_chain(f"/proc/self/fd/{memory}")
        finally:
            os.close(memory)
        return context

    def _private(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(
            hmac.digest(self._key, b"tiered_kv peers: certificate", hashlib.sha256)
        )

    def _certificate(self) -> x509.Certificate:
        private = self._private()
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tiered_kv peers")])
        builder = x509.CertificateBuilder(name, name, private.public_key(), 1, _FIRST_DAY, _LAST_DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return builder.sign(private, None)
