"""What several tests of tiers need."""

import subprocess

import pytest


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate for localhost that is its own authority, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    paths = (str(directory / "certificate.pem"), str(directory / "key.pem"))
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run([*command.split(), "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True)
    return paths
