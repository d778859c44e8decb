"""A medium from another package: the one that docs/extending.md shows, built, checked by the suite and served from."""

import json
import os
import re
import sqlite3
import subprocess
import sys
import tomllib

import pytest

from tiered_kv.config import Config
from tiered_kv.errors import ConfigError
from tiered_kv.location import parse_location
from tiered_kv.testing.contract import TierContract
from tiered_kv.tiers.open import extension_tier

SCRIPT = """
import json, random, sys
from test_cache import NAMESPACE, PAGES
from tiered_kv import Cache

tokens = list(range(8 * 64))
settings = {"storage_uri": sys.argv[2], "host_bytes": "8MiB", "chunk_tokens": 64, "storage_bytes": "1GiB"}
with Cache(settings, NAMESPACE, PAGES) as cache:
    data = [random.Random(index).randbytes(cache.chunk_bytes) for index in range(8)]
    if sys.argv[1] == "store":
        print(json.dumps({"stored": cache.store(tokens, data.__getitem__)}))
    else:
        with cache.load(tokens) as prefix:
            found = [bytes(chunk) for chunk in prefix.chunks]
            print(json.dumps({"chunks": len(found), "is_equal": found == data[: len(found)]}))
"""


@pytest.fixture(scope="module")
def site(repository, tmp_path_factory):
    """The package of the page, installed into a directory as pip would."""
    page = (repository / "docs" / "extending.md").read_text()
    place = tmp_path_factory.mktemp("site")
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.S):
        (place / name).write_text(code)
    [described] = re.findall(r"```toml\n(.*?)```", page, re.S)
    project = tomllib.loads(described)["project"]
    installed = place / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    installed.mkdir()
    named = f"Name: {project['name']}\nVersion: {project['version']}\n"
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\n{named}")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    return place


@pytest.fixture
def run(site, repository, tmp_path):
    """Run Python where the package is installed, beside the one that is tested."""

    def run(*command):
        path = os.pathsep.join(map(str, (site, repository, repository / "tests")))
        environment = os.environ | {"PYTHONPATH": path, "XDG_STATE_HOME": str(tmp_path / "state")}
        return subprocess.run(
            [sys.executable, *command],
            check=False,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=110,
        )

    return run


def test_the_page_s_medium_passes_the_shipped_suite(run, site):
    result = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(site / "test_sqlite_tier.py"))
    assert result.returncode == 0, result.stdout + result.stderr
    least = sum(name.startswith("test_") for name in vars(TierContract))
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) >= least > 15 and "skipped" not in result.stdout


def test_a_suite_that_is_not_kept_fails(run, site, tmp_path):
    code = (site / "sqlite_tier.py").read_text()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sqlite_tier.py").write_text(code.replace("rowcount > 0", "rowcount >= 0"))
    (broken / "test_broken.py").write_text((site / "test_sqlite_tier.py").read_text())
    result = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(broken / "test_broken.py"))
    assert result.returncode == 1 and "test_delete_of_a_missing_blob_answers_false" in result.stdout


def test_a_cache_is_served_from_the_medium(run, tmp_path):
    database = tmp_path / "kv.db"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def answer(what):
        result = run(str(script), what, f"sqlite://{database}")
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    def execute(query):
        with sqlite3.connect(database) as connection:
            return connection.execute(query).fetchall()

    assert answer("store") == {"stored": 8}
    assert execute("SELECT count(*) FROM blobs") == [(8,)]
    assert answer("load") == {"chunks": 8, "is_equal": True}  # another process: nothing of it is in host memory
    execute("DELETE FROM blobs")
    assert answer("load") == {"chunks": 0, "is_equal": True}  # so it was the medium that answered


def test_a_scheme_that_nobody_registers_is_unknown():
    with pytest.raises(ConfigError, match="unknown scheme 'sqlite'"):
        parse_location("sqlite:///var/kv.db")


def test_what_a_registered_uri_names(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    location = parse_location("sqlite:///var/a%20b.db?cache=1", {"secret": "s3cret"})
    assert (location.kind, location.path) == ("extension", "/var/a b.db")
    assert location.options == {"cache": "1", "secret": "s3cret"} and "s3cret" not in repr(location) + str(location)
    with pytest.raises(ConfigError, match="no credentials") as caught:
        parse_location("sqlite://me:s3cret@host/kv.db")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sqlite = nowhere_at_all:open_it", "cannot be imported .nowhere_at_all:open_it"),
        ("sqlite = sqlite_tier:open_nothing", "cannot be imported"),
        ("sqlite = builtins:print", "gives no Tier"),
    ],
)
def test_a_registration_that_does_not_work_says_why(site, tmp_path, monkeypatch, line, words):
    installed = tmp_path / "other-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[tiered_kv.tiers]\n{line}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = Config.from_mapping({"storage_uri": f"sqlite://{tmp_path}/kv.db"})
    with pytest.raises(ConfigError, match=words):
        extension_tier(config)
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(ConfigError, match="several installed packages register the scheme 'sqlite'"):
        parse_location("sqlite:///kv.db")
