"""docker-compose.yml keeps what its text and docs/operations.md promise. Containers are run by the fixture ``s3``."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

FILE = "docker-compose.yml"
PINNED = re.compile(r"[\w./-]+:(?!latest\b)[\w.-]*\d[\w.-]*")


@pytest.fixture(scope="module")
def compose(repository: Path) -> dict:
    return yaml.safe_load((repository / FILE).read_text())


def defaults(text: str) -> dict[str, str]:
    """Variables of the file and what they are when nobody sets them."""
    return dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))


def filled(value: str) -> str:
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def compose_command() -> list[str] | None:
    """Compose, if it is here, as a plugin or by itself; checking a file takes no engine."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is not None:
            known = subprocess.run([*command, "version"], capture_output=True, timeout=60, check=False)
            if known.returncode == 0:
                return command
    return None


def test_compose_accepts_the_file(repository: Path, compose: dict) -> None:
    """By Docker's own parser where there is one; the facts that only the specification knows, else."""
    command = compose_command()
    if command is not None:
        done = subprocess.run(
            [*command, "-f", FILE, "config", "-q"],
            cwd=repository,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert set(compose) == {"services", "volumes"}, "what Compose 1 and 2 both accept"
    known = {"image", "command", "entrypoint", "environment", "ports", "volumes", "healthcheck", "restart", "init"}
    for service in compose["services"].values():
        assert set(service) <= known | {"depends_on"}


def test_images_are_variables_with_a_pinned_default(repository: Path, compose: dict) -> None:
    text = (repository / FILE).read_text()
    assert defaults(text)["TIERED_KV_MINIO_IMAGE"] == "quay.io/minio/minio:RELEASE.2025-09-07T16-13-09Z"
    for service in compose["services"].values():
        assert re.fullmatch(r"\$\{TIERED_KV_\w+_IMAGE:-[^}]+\}", service["image"])
        assert PINNED.fullmatch(filled(service["image"]))
    for image in re.findall(r"^#\s+image: (\S+)", text, flags=re.MULTILINE):
        assert PINNED.fullmatch(image)


def test_nothing_listens_beyond_this_machine(compose: dict) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", ())]
    assert [filled(port) for port in ports] == ["127.0.0.1:9000:9000", "127.0.0.1:9001:9001"]


def test_every_service_says_when_it_is_healthy_and_none_ends(compose: dict) -> None:
    """``up --wait`` fails for a service that has ended, even if it ended well."""
    for service in compose["services"].values():
        assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    assert "exec sleep infinity" in compose["services"]["mc"]["command"][0]


def test_bucket_is_made_once_the_server_is_healthy(repository: Path, compose: dict) -> None:
    mc = compose["services"]["mc"]
    assert mc["depends_on"] == {"minio": {"condition": "service_healthy"}}
    assert 'mc mb --ignore-existing "store/$$BUCKET"' in mc["command"][0]
    assert filled(mc["environment"]["BUCKET"]) == "tiered-kv"
    assert '"store/$$BUCKET"' in mc["healthcheck"]["test"][1]
    assert "s3://tiered-kv/" in (repository / FILE).read_text()


def test_what_is_stored_is_in_a_named_volume(compose: dict) -> None:
    assert compose["services"]["minio"]["volumes"] == ["minio-data:/data"]
    assert set(compose["volumes"]) == {"minio-data"}


def test_credentials_are_variables_and_shared(repository: Path, compose: dict) -> None:
    minio, mc = (compose["services"][name]["environment"] for name in ("minio", "mc"))
    for name in ("MINIO_ROOT_USER", "MINIO_ROOT_PASSWORD"):
        assert minio[name] == mc[name]
        assert minio[name].startswith(f"${{{name}:-")
    assert len(filled(minio["MINIO_ROOT_PASSWORD"])) >= 8  # MinIO does not start with less


def test_fixture_sets_variables_that_exist(repository: Path) -> None:
    """A renamed variable would leave the tests on the ports and the volume of a user's own server."""
    support = (repository / "scripts" / "s3_service.py").read_text()
    used = set(re.findall(r'"((?:TIERED_KV|MINIO)_\w+)":', support))
    assert {"TIERED_KV_MINIO_PORT", "TIERED_KV_BUCKET", "MINIO_ROOT_USER", "MINIO_ROOT_PASSWORD"} <= used
    assert used <= set(defaults((repository / FILE).read_text()))
