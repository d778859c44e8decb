"""Epochs: retired durably, never adopted twice, never guessed from a damaged file."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tiered_kv.errors import ConfigError, TierUnavailable
from tiered_kv.server.epochs import Epochs

ONE, TWO = b"1" * 16, b"2" * 16


def test_a_reset_is_remembered_for_its_namespace_only(tmp_path: Path) -> None:
    epochs = Epochs(tmp_path)
    assert epochs.base(ONE) == epochs.base(TWO) == "base-0"
    private = {epochs.retire(ONE) for _ in range(3)}
    assert len(private) == 3 and all(name.startswith("private-") for name in private)
    for known in (epochs, Epochs(tmp_path)):
        assert (known.base(ONE), known.base(TWO)) == ("base-3", "base-0")


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Files that this process writes end there, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe\x00", b'{"\xff": 1}', b"\0" * 40])
def test_a_damaged_file_retires_every_epoch_and_is_kept(tmp_path: Path, text: bytes) -> None:
    Epochs(tmp_path).retire(ONE)
    (tmp_path / "epochs.json").write_bytes(text)
    epochs = Epochs(tmp_path)
    assert epochs.base(TWO) not in {"base-0", "base-1"}
    assert epochs.base(TWO) == Epochs(tmp_path).base(TWO), "a start later it is the same"
    (kept,) = tmp_path.glob("epochs.damaged-*.json")
    assert kept.read_bytes() == text
    before = epochs.base(ONE)
    epochs.retire(ONE)
    assert epochs.base(ONE) != before


@pytest.mark.parametrize("text", [b"[]", b'{"a": "b"}', b"null", b'{"model": {"epochs": 3}}'])
def test_a_file_of_somebody_else_stops_the_start_and_stays(tmp_path: Path, text: bytes) -> None:
    """A training run's ``epochs.json``, say: what it holds is nothing that a crash makes of ours."""
    (tmp_path / "epochs.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"epochs\.json .* is not what a cache server writes, so it stays"):
        Epochs(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["epochs.json"]
    assert (tmp_path / "epochs.json").read_bytes() == text


def test_a_reset_that_is_not_durable_is_none(tmp_path: Path) -> None:
    epochs = Epochs(tmp_path)
    epochs.retire(ONE)
    with files_of_at_most(8), pytest.raises(TierUnavailable, match="cannot write the epochs"):
        epochs.retire(ONE)
    assert epochs.base(ONE) == Epochs(tmp_path).base(ONE) == "base-1"


def test_a_file_that_cannot_be_read_is_not_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "epochs.json").mkdir()
    with pytest.raises(TierUnavailable, match="cannot read the epochs"):
        Epochs(tmp_path)


def test_a_damaged_file_that_cannot_be_replaced_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "epochs.json").write_bytes(b"damaged")
    for _ in range(2):
        with files_of_at_most(8), pytest.raises(TierUnavailable, match="cannot write the epochs"):
            Epochs(tmp_path)
    assert (tmp_path / "epochs.json").read_bytes() == b"damaged"
