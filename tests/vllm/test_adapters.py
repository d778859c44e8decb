"""Which adapters have an identity, and when it may be looked up and stored: files on disk and what ranks told."""

import os
import time
from types import SimpleNamespace

import pytest

from tests.kit.vllm.tiny_adapters import adapter_files, lora
from tiered_kv.vllm.identity import adapters as door
from tiered_kv.vllm.identity import loader_watch as loads
from tiered_kv.vllm.identity.adapters import Adapters, Unaccountable
from tiered_kv.vllm.identity.file_digests import digest_files
from tiered_kv.vllm.identity.loader_watch import adapter_stamps, stamps_text
from tiered_kv.vllm.step import SaveReport

HOUR_NS = 3600 * 10**9


def told(folder):
    return stamps_text(adapter_stamps(str(folder)))


def rewrite(folder):
    """In place, with the same bytes and the old time, as rsync -t and tar do."""
    time.sleep(0.02)  # a tick of the file system's clock
    file = folder / "adapter_model.safetensors"
    at = file.stat()
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))


@pytest.fixture
def folder(tmp_path):
    return adapter_files(tmp_path / "a", 1)


def started_later(numerics="bfloat16"):
    """Those of an engine that started an hour after now, by a clock that goes on from there: the files are older."""
    return Adapters(numerics, wall_ns=lambda: time.time_ns() + HOUR_NS)


def test_adapter_younger_than_the_engine_is_looked_up_once_every_rank_has_told(folder):
    adapters = Adapters("bfloat16", world_size=2)
    found = adapters.identity(lora("a", folder))
    assert (adapters.may_look_up(found), adapters.is_held(found)) == (False, False)
    adapters.take_reports({1: {0: told(folder)}})
    assert (adapters.may_look_up(found), adapters.is_held(found)) == (False, False)
    adapters.take_reports({1: {1: told(folder)}})
    assert (adapters.may_look_up(found), adapters.is_held(found)) == (True, True)


def test_adapter_older_than_the_engine_is_looked_up_at_once_and_stored_when_told(folder):
    adapters = started_later()
    found = adapters.identity(lora("a", folder))
    assert (adapters.may_look_up(found), adapters.is_held(found)) == (True, False)
    adapters.take_reports({1: {0: told(folder)}})
    assert (adapters.may_look_up(found), adapters.is_held(found)) == (True, True)


def test_files_that_seem_older_because_the_clock_went_back_wait_for_the_ranks(folder):
    """NTP sets a clock that was ahead when the engine started; a rank may hold what lay there before."""
    ahead_ns = [HOUR_NS]
    adapters = Adapters("bfloat16", wall_ns=lambda: time.time_ns() + ahead_ns[0])
    ahead_ns[0] = 0
    rewrite(folder)
    found = adapters.identity(lora("a", folder))
    assert not adapters.may_look_up(found)
    adapters.take_reports({1: {0: told(folder)}})
    assert adapters.may_look_up(found)


def test_files_touched_since_the_keys_were_made_are_not_looked_up_and_not_read_again(folder):
    adapters = started_later()
    found = adapters.identity(lora("a", folder))
    rewrite(folder)
    assert not adapters.may_look_up(found)
    with pytest.raises(Unaccountable, match=r"changed while vLLM runs.*directory of its own"):
        adapters.identity(lora("a", folder))


def test_files_written_after_vllm_loaded_them_have_no_identity(folder):
    adapters = Adapters("bfloat16")
    adapters.take_reports({1: {0: told(folder)}})
    rewrite(folder)
    with pytest.raises(Unaccountable, match=r"not those that vLLM loaded.*directory of its own"):
        adapters.identity(lora("a", folder))


def test_adapter_that_changed_while_it_was_loaded_has_no_identity(folder):
    adapters = Adapters("bfloat16")
    adapters.take_reports({1: {0: ""}})
    with pytest.raises(Unaccountable, match="not those that vLLM loaded"):
        adapters.identity(lora("a", folder))


def test_adapter_that_left_vllm_and_came_back_the_same_goes_on(folder):
    adapters = Adapters("bfloat16")
    assert not adapters.take_reports({1: {0: told(folder)}})
    assert not adapters.take_reports({1: {0: told(folder)}})
    assert adapters.is_held(adapters.identity(lora("a", folder)))


def test_adapter_replaced_under_its_id_is_left_alone_even_if_the_first_comes_back(folder, tmp_path):
    adapters, other = Adapters("bfloat16"), adapter_files(tmp_path / "b", 2)
    adapters.take_reports({1: {0: told(folder)}})
    found = adapters.identity(lora("a", folder))
    assert adapters.take_reports({1: {0: told(other)}})
    assert adapters.take_reports({1: {0: told(folder)}})
    assert not adapters.is_held(found)
    with pytest.raises(Unaccountable, match="replaced while vLLM runs"):
        adapters.check(found)
    assert adapters.take_reports({2: {0: told(other)}}) is False
    assert adapters.is_held(adapters.identity(lora("b", other, number=2)))


def test_adapter_of_another_name_at_the_same_path_has_its_own_files(folder):
    adapters = Adapters("bfloat16")
    adapters.take_reports({1: {0: told(folder)}})
    first = adapters.identity(lora("v1", folder))
    rewrite(folder)
    adapters.take_reports({2: {0: told(folder)}})
    second = adapters.identity(lora("v2", folder, number=2))
    assert adapters.is_held(second) and adapters.is_held(first)
    assert not adapters.may_look_up(first), "vLLM may read it again, and would get the second"


@pytest.mark.parametrize(("version", "is_known"), [("0.30.2", False), ("0.31.0", True), ("0.32.0", True)])
def test_name_pointed_elsewhere_is_new_where_vllms_own_cache_tells_paths_apart(
    folder, tmp_path, monkeypatch, version, is_known
):
    monkeypatch.setattr(door.vllm, "__version__", version)
    adapters, other = Adapters("bfloat16"), adapter_files(tmp_path / "b", 2)
    adapters.identity(lora("a", folder))
    if is_known:
        assert adapters.identity(lora("a", other, number=2)).path == str(other)
    else:
        with pytest.raises(Unaccountable, match="changed while vLLM runs"):
            adapters.identity(lora("a", other, number=2))


def test_ids_that_ranks_told_of_are_bounded_and_those_that_are_asked_for_stay(folder, monkeypatch):
    """vLLM counts a new id for each load that a client asks for, for as long as the engine lives."""
    monkeypatch.setattr(door, "MAX_HELD", 2)
    adapters = Adapters("bfloat16")
    adapters.take_reports({1: {0: told(folder)}})
    adapters.take_reports({2: {0: told(folder)}})
    used, unused = (adapters.identity(lora("a", folder, number=number)) for number in (1, 2))
    adapters.identity(lora("a", folder, number=1))  # loaded first, asked for last
    adapters.take_reports({3: {0: told(folder)}})
    assert adapters.is_held(adapters.identity(lora("a", folder, number=3))), "the newest load counts"
    assert (adapters.is_held(used), adapters.is_held(unused)) == (True, False)


def test_only_files_that_vllm_reads_of_an_adapter_count(folder, tmp_path):
    """A trainer leaves its optimizer beside them, twice their size and more: read by none, hashed by the scheduler."""
    (other := adapter_files(tmp_path / "b", 1)).joinpath("optimizer.pt").write_bytes(bytes(1 << 20))
    for name in ("trainer_state.json", "tokenizer.json", "training_args.bin", "merged.safetensors"):
        (other / name).write_text("{}")
    adapters = Adapters("bfloat16")
    assert adapters.identity(lora("a", folder)).identity == adapters.identity(lora("b", other, number=2)).identity
    (other / "trainer_state.json").write_text('{"step": 2}')
    adapters.identity(lora("b", other, number=2))


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "adapter_config.json"])
def test_every_file_that_vllm_may_read_of_an_adapter_counts(folder, tmp_path, name):
    (other := adapter_files(tmp_path / "b", 1)).joinpath(name).write_bytes(b"{}")
    adapters = Adapters("bfloat16")
    assert adapters.identity(lora("a", folder)).identity != adapters.identity(lora("b", other, number=2)).identity


def test_an_adapter_that_vllm_reads_from_elsewhere_has_no_identity(folder):
    """Of vLLM before 0.32: its tensors come from a folder that the request's own configuration names."""
    request = SimpleNamespace(
        lora_name="a", lora_path=str(folder), lora_int_id=1, tensorizer_config_dict={"tensorizer_dir": "/elsewhere"}
    )
    with pytest.raises(Unaccountable, match="tensorizer"):
        Adapters("bfloat16").identity(request)


def test_files_of_many_adapters_are_read_once_each(tmp_path):
    """In vLLM's scheduler thread: a hundred MB and more for each request, where many take turns."""
    adapters = Adapters("bfloat16")
    named = [
        lora(f"a{number}", adapter_files(tmp_path / str(number), number), number=number) for number in range(1, 67)
    ]
    first = [adapters.identity(one).identity for one in named]
    assert len(set(first)) == len(named)
    read = digest_files.cache_info().misses
    assert [adapters.identity(one).identity for one in named] == first
    assert digest_files.cache_info().misses == read


def test_reports_of_ranks_are_put_together():
    report = SaveReport(adapters={1: {0: "a"}, 2: {0: "b"}})
    report.aggregate(SaveReport(adapters={1: {1: "a"}, 3: {1: "c"}}))
    assert report.adapters == {1: {0: "a", 1: "a"}, 2: {0: "b"}, 3: {1: "c"}}


class Loader:
    """The method of vLLM's that reads an adapter, with something that happens while it reads."""

    def __init__(self):
        self.meanwhile = lambda: None

    def _load_adapter(self, lora_request):
        self.meanwhile()
        return "loaded"


@pytest.fixture
def loader(monkeypatch):
    monkeypatch.setattr(loads, "_adapter_loads", {})
    monkeypatch.setattr(Loader, "_load_adapter", Loader._load_adapter)
    loads._wrap(Loader, "_load_adapter", loads._noting_adapter)
    loads._wrap(Loader, "_load_adapter", loads._noting_adapter)  # once is enough
    return Loader()


def test_a_load_is_noted_with_what_was_read_and_told_once(loader, folder):
    assert loader._load_adapter(lora("a", folder, number=5)) == "loaded"
    number, found = loads.adapter_loads(0)
    assert (number, found) == (1, {5: told(folder)})
    assert loads.adapter_loads(number) == (1, {})


def test_a_load_during_which_files_change_is_noted_as_nothing(loader, folder):
    loader.meanwhile = lambda: rewrite(folder)
    loader._load_adapter(lora("a", folder))
    assert loads.adapter_loads(0)[1] == {1: ""}


def test_a_load_that_fails_leaves_what_was_there(loader, folder, tmp_path):
    loader._load_adapter(lora("a", folder))

    def fail():
        raise ValueError("torn")

    loader.meanwhile = fail
    with pytest.raises(ValueError, match="torn"):
        loader._load_adapter(lora("a", adapter_files(tmp_path / "b", 2)))
    assert loads.adapter_loads(0) == (1, {1: told(folder)})


def test_loads_remembered_are_bounded(loader, folder, monkeypatch):
    monkeypatch.setattr(loads, "MAX_NOTES", 3)
    for number in range(1, 6):
        loader._load_adapter(lora("a", folder, number=number))
    assert sorted(loads.adapter_loads(0)[1]) == [3, 4, 5]
    assert loads.adapter_loads(0)[0] == 5


def test_a_step_looks_at_what_is_new_and_not_at_all_that_was_ever_loaded(monkeypatch):
    looked = []

    class Number(int):
        """The number of a load, which says when it is compared."""

        def __le__(self, other):
            looked.append(int(self))
            return int(self) <= other

        def __gt__(self, other):
            return not self <= other

    monkeypatch.setattr(loads, "_adapter_loads", {100 + i: (Number(i), f"files {i}") for i in range(1, 1001)})
    assert loads.adapter_loads(998) == (1000, {1099: "files 999", 1100: "files 1000"})
    looked.clear()
    assert loads.adapter_loads(1000) == (1000, {})
    assert len(looked) <= 2
