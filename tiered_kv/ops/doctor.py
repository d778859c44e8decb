"""Run every check of a configuration, and work out what the settings come to.

Checks live by topic in the modules beside this one (``doctor_config``, ``doctor_server``, ``doctor_disk``,
``doctor_object``, ``doctor_mooncake``, ``doctor_peers``); here is their order, and what needs several of them:
capacities against the chunks that are there. The tests remove what they write; where a server runs, its own statistics
replace them.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from tiered_kv.config import Config, size_text
from tiered_kv.errors import ConfigError, TierUnavailable
from tiered_kv.keys.namespace import SELF_TEST_NAMESPACE
from tiered_kv.location import redact
from tiered_kv.ops.disk_storage import DiskStorage
from tiered_kv.ops.doctor_config import check_host_default, check_settings
from tiered_kv.ops.doctor_disk import capacity_bytes, check_disk, check_marker
from tiered_kv.ops.doctor_mooncake import check_pool
from tiered_kv.ops.doctor_object import check_object
from tiered_kv.ops.doctor_peers import check_peers
from tiered_kv.ops.doctor_server import (
    Running,
    check_descriptors,
    check_memory,
    check_regions,
    check_socket,
    find_running,
)
from tiered_kv.ops.findings import DoctorFinding, DoctorMeasurement, error, ok, warning
from tiered_kv.ops.forest import Forest
from tiered_kv.ops.object_storage import ObjectStorage
from tiered_kv.ops.report import Report
from tiered_kv.ops.storage import Content, NamespaceRecord, StoredBlob, Stray
from tiered_kv.ops.text import counted
from tiered_kv.tiering.types import PINNED_SHARE_MAX, Limits
from tiered_kv.tiers.disk.tier import metadata_reserve

CHUNKS_FEW: Final = 16
NAMESPACES_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of the KV that would be stored.

    Attributes:
        name: Whose it is, in words.
        chunk_bytes: Bytes of a blob.
        chunk_tokens: None: not known, of rows.
        max_model_len: Longest prompt; None: not known.
        state_parts: Of the state of its recurrent layers at a hit's end, each as large as a chunk.
        is_of_rows: Chunks are vLLM's rows: they are loaded a few at a time, however many a prompt has.
    """

    name: str
    chunk_bytes: int
    chunk_tokens: int | None
    max_model_len: int | None = None
    state_parts: int = 0
    is_of_rows: bool = False


class DoctorReport(Report, frozen=True, kw_only=True):
    """What ``doctor`` finds.

    Attributes:
        works: No finding is an error.
        plan: What the settings come to, in one line; empty where they are wrong.
        errors: How many findings are errors.
        warnings: How many findings are warnings.
        findings: Every check, in the order in which they ran.
        measurements: Times of the tiers that were tested.
    """

    works: bool
    plan: str
    errors: int
    warnings: int
    findings: list[DoctorFinding]
    measurements: list[DoctorMeasurement]


@dataclass(slots=True)
class Examination:
    """What was found so far; every check appends.

    Attributes:
        plan: What the settings come to, in one line; empty where they are wrong.
    """

    plan: str = ""
    findings: list[DoctorFinding] = field(default_factory=list)
    measurements: list[DoctorMeasurement] = field(default_factory=list)

    def report(self) -> DoctorReport:
        """What ``doctor`` prints."""
        statuses = Counter(finding.status for finding in self.findings)
        return DoctorReport(
            works=not statuses["error"],
            plan=self.plan,
            errors=statuses["error"],
            warnings=statuses["warning"],
            findings=self.findings,
            measurements=self.measurements,
        )


def examine(
    result: Examination,
    settings: Mapping[str, object],
    *,
    chunk_bytes: int | None = None,
    max_model_len: int | None = None,
    is_tier: bool = False,
) -> None:
    """Run every check.

    Args:
        result: Takes what is found, behind what it holds already.
        settings: As in ``kv_connector_extra_config``, unchecked.
        chunk_bytes: Size of a chunk; None: derived from the stored namespaces.
        max_model_len: Longest prompt; None: the same.
        is_tier: The settings are those of a tier below vLLM's own offloading.
    """
    start = len(result.findings)
    config, findings = check_settings(settings)
    result.findings += findings
    if config is None:
        return
    if is_tier:
        config = config.below_offloading(chunk_bytes or 0)
        result.findings += [*check_host_default(config), *check_regions()]
    refusals = check_marker(config.disk_root())
    result.findings[start:start] = refusals  # before everything else: nothing would be started there
    running = find_running(config)
    result.findings += [
        *check_memory(config, running),
        *check_descriptors(config),
        *check_socket(config),
        *running.findings,
        *check_peers(config, running),
    ]
    disk, disk_bytes = (Content(), config.disk_bytes) if refusals else _examine_disk(config, running, result)
    bucket = _examine_object(config, result) if config.location().kind == "object" else Content()
    if config.location().kind == "pool":
        findings, measurements = check_pool(config)
        result.findings += findings
        result.measurements += measurements
    for name, listing in (("disk", disk), ("object", bucket)):
        result.findings += check_namespaces(config, name, listing, is_tier=is_tier)
    models = models_of([disk, bucket], of_rows=is_tier)
    if chunk_bytes is not None:
        models = [Model("--chunk-bytes", chunk_bytes, None if is_tier else config.chunk_tokens, is_of_rows=is_tier)]
    if max_model_len is not None:
        models = [replace(model, max_model_len=max_model_len) for model in models]
    result.findings += check_chunks(config, disk_bytes, models)
    result.plan = plan(config, disk_bytes)


def _examine_disk(config: Config, running: Running, result: Examination) -> tuple[Content, int | None]:
    """Check the disk tier.

    Returns:
        What lies in it, and its limit; None where there is no such tier or its default cannot be computed.
    """
    root, content = config.disk_root(), Content()
    if root is None:
        return content, None
    if os.path.isdir(root):
        try:
            with DiskStorage(root) as storage:
                content = storage.look()
        except (TierUnavailable, ConfigError) as exc:
            result.findings.append(error("directory", f"it cannot be listed: {exc}", "mend its rights"))
            return content, config.disk_bytes
        content.blobs = [blob for blob in content.blobs if blob.name.namespace != SELF_TEST_NAMESPACE]
        result.findings += _strays(content.strays)
    findings, measurements = check_disk(config, running, content.blob_bytes)
    result.findings += findings
    result.measurements += measurements
    if any(finding.check == "directory" for finding in findings if finding.status == "error"):
        return content, config.disk_bytes
    limit = capacity_bytes(config, running, content.blob_bytes)
    result.findings += _pins(content, limit)
    return content, limit


def _pins(content: Content, limit_bytes: int) -> list[DoctorFinding]:
    """Report pins that leave no room for anything else; no finding for others."""
    pinned = [blob for blob in content.blobs if blob.pinned_until_s]
    kept_bytes = sum(blob.size_bytes for blob in Forest(content.blobs).with_states(pinned)) if pinned else 0
    for_blobs = limit_bytes - metadata_reserve(limit_bytes)
    if kept_bytes <= PINNED_SHARE_MAX * for_blobs:
        return []
    text = f"they keep {size_text(kept_bytes)} of {size_text(for_blobs)}: hardly anything else can be stored"
    hint = "`tiered-kv pin URI --list` names them: unpin what nobody needs, or raise disk_bytes"
    return [warning("pins", text, hint)]


def _strays(strays: Sequence[Stray]) -> list[DoctorFinding]:
    findings: list[DoctorFinding] = []
    if others := sum(stray.kind == "foreign" for stray in strays):
        text = f"{counted(others, 'chunk')} of another format version or namespace: never a hit, and evicted in time"
        findings.append(ok("disk content", text))
    count = len(strays) - others
    if not count:
        return findings
    text = (
        "one file in it is no sound blob of ours" if count == 1 else f"{count} files in it are no sound blobs of ours"
    )
    return [
        *findings,
        warning("directory", text, "`tiered-kv verify` names them; `gc` removes what writes left that were cut off"),
    ]


def _examine_object(config: Config, result: Examination) -> Content:
    """Check the object store; returns what lies in it, as far as it was listed."""
    try:
        storage = ObjectStorage(
            config.location(), timeout_s=config.storage_timeout_s, concurrency=config.storage_concurrency
        )
    except ConfigError as exc:
        result.findings.append(error("object store", str(exc), "install it where the engines run"))
        return Content()
    with storage:
        findings, measurements, content = check_object(config, storage)
    result.findings += findings
    result.measurements += measurements
    return content


# -- what is there ----------------------------------------------------------------------------------------------------


def check_namespaces(config: Config, name: str, listing: Content, *, is_tier: bool) -> list[DoctorFinding]:
    """Say which models' chunks lie in a tier, and whether chunks of these settings could be among them.

    Args:
        is_tier: As in :func:`examine`: vLLM's rows have as many tokens as vLLM says.
    """
    sizes: Counter[bytes] = Counter()
    counts: Counter[bytes] = Counter()
    for blob in listing.blobs:
        sizes[blob.name.namespace] += blob.size_bytes
        counts[blob.name.namespace] += 1
    if not counts:
        return []
    check, least = f"{name} content", "" if listing.is_whole else "at least "
    findings = [
        ok(
            check,
            f"{counted(len(counts), 'namespace')}, {least}{counted(counts.total(), 'chunk')}, "
            f"{size_text(sizes.total())}",
        )
    ]
    for space, count in counts.most_common(NAMESPACES_SHOWN):
        record = listing.records.get(space)
        text = f"{space.hex()}: {least}{counted(count, 'chunk')}, {size_text(sizes[space])}, {_identity(record)}"
        findings.append(ok(check, text))
    ours = [] if is_tier else [r for r in listing.records.values() if r.chunk_tokens is not None and not r.is_of_rows]
    others = [record for record in ours if record.chunk_tokens != config.chunk_tokens]
    if others and len(others) == len(ours):
        what = "all of it" if len(ours) == len(listing.records) else "what is no row of vLLM's offloading"
        text = f"{what} was stored with another chunk_tokens than {config.chunk_tokens}, so none of it can be a hit"
        findings.append(warning(check, text, f"set chunk_tokens to {others[0].chunk_tokens}, if the rest is equal"))
    if config.storage_bytes is not None and name == "object" and sum(sizes.values()) > config.storage_bytes:
        findings.append(warning(check, "more than storage_bytes lies there", "the leader deletes down to the limit"))
    return findings


def _identity(record: NamespaceRecord | None) -> str:
    if record is None or record.namespace is None:
        return "no record that can be read"
    fields = record.namespace.fields
    weights = str(fields.get("weights"))[:60]
    size = f"chunk_tokens {fields.get('chunk_tokens')}"
    if record.is_of_rows:
        size = f"rows of vLLM's offloading of {fields.get('chunk_tokens')} tokens"
    return f"weights {weights}, {size}, epoch {fields.get('epoch')}"


# -- capacities against chunks ----------------------------------------------------------------------------------------


def models_of(listings: Sequence[Content], *, of_rows: bool) -> list[Model]:
    """Chunk size and prompt length of the stored namespaces, from their records and largest blobs.

    Args:
        of_rows: Of those below vLLM's own offloading; else of the others.
    """
    found: dict[bytes, Model] = {}
    for listing in listings:
        largest: dict[bytes, StoredBlob] = {}
        for blob in listing.blobs:
            space = blob.name.namespace
            if space not in largest or largest[space].size_bytes < blob.size_bytes:
                largest[space] = blob
        for space, blob in largest.items():
            record = listing.records.get(space)
            if record is None or record.namespace is None or not record.chunk_tokens or record.is_of_rows != of_rows:
                continue
            length = record.namespace.fields.get("max_model_len")
            known = length if isinstance(length, int) and not isinstance(length, bool) else None
            name = f"namespace {space.hex()[:8]}"
            sizes = blob.size_bytes, record.chunk_tokens, known, record.state_parts
            found.setdefault(space, Model(name, *sizes, is_of_rows=of_rows))
    return list(found.values())[:NAMESPACES_SHOWN]


def check_chunks(config: Config, disk_bytes: int | None, models: Sequence[Model]) -> list[DoctorFinding]:
    """How many chunks fit, and whether the longest prompt can be loaded as a whole."""
    if not models:
        text = "how many fit is not known: nothing is stored here yet"
        return [ok("chunks", f"{text}, and --chunk-bytes was not said")]
    findings: list[DoctorFinding] = []
    for model in models:
        findings += _check_model(config, disk_bytes, model)
    return findings


def _check_model(config: Config, disk_bytes: int | None, model: Model) -> list[DoctorFinding]:
    host = config.resolved_host_bytes()
    fit = host // model.chunk_bytes
    what = "a row" if model.is_of_rows else "a chunk"
    what += f" of {model.chunk_tokens} tokens" if model.chunk_tokens is not None else ""
    text = f"{model.name}: {what} takes {size_text(model.chunk_bytes)}; host {fit}"
    room = None if disk_bytes is None else max(0, disk_bytes - metadata_reserve(disk_bytes))
    if room is not None:
        text += f", disk {room // model.chunk_bytes}"
    if fit < 1:
        hint = f"set host_bytes to {size_text(model.chunk_bytes)} and more"
        return [error("chunks", f"{text}: host memory cannot hold one", hint)]
    if room is not None and room < model.chunk_bytes:
        return [error("chunks", f"{text}: the disk tier cannot hold one", "set disk_bytes higher")]
    if not model.is_of_rows and model.chunk_tokens is not None:
        limits = Limits()
        leased = int(host * limits.request_share) // model.chunk_bytes
        tokens = max(0, leased - model.state_parts) * model.chunk_tokens
        text += f"; one request may load {tokens} tokens"
        if model.max_model_len is not None and tokens < model.max_model_len:
            held_tokens = model.max_model_len + model.state_parts * model.chunk_tokens
            needed = limits.least_host_bytes(held_tokens, model.chunk_tokens, model.chunk_bytes)
            least = f"{-(-needed // (1 << 20))}MiB"
            hint = f"the rest is computed; set host_bytes to {least} or more to load the longest prompt whole"
            return [warning("chunks", f"{text} of max_model_len {model.max_model_len}", hint)]
    if fit < CHUNKS_FEW:
        return [warning("chunks", f"{text}: little room", "set host_bytes higher")]
    return [ok("chunks", text)]


# -- the plan ---------------------------------------------------------------------------------------------------------


def plan(config: Config, disk_bytes: int | None) -> str:
    """What the settings come to: ``host 4 GiB -> disk 50 GiB at /var/cache/tiered_kv -> s3://bucket/prefix (...)``."""
    parts = [f"host {size_text(config.resolved_host_bytes())}"]
    root = config.disk_root()
    if root is not None:
        parts.append(f"disk {size_text(disk_bytes)} at {root}" if disk_bytes is not None else f"disk at {root}")
    if config.location().kind == "object":
        limits = []
        if config.storage_bytes is not None:
            limits.append(f"limit {size_text(config.storage_bytes)}")
        if config.storage_ttl is not None:
            limits.append(f"unused for {_time_text(config.storage_ttl)} goes")
        parts.append(f"{redact(str(config.location()))} ({', '.join(limits) or 'no limit'})")
    if config.location().kind == "pool":
        parts.append(f"{config.location()} (its master evicts)")
    if config.peers is not None:
        fixed = sum(place.startswith("https://") for place in config.peers)
        others = [place for place in config.peers if not place.startswith("https://")]
        said = [counted(fixed, "peer")] if fixed else []
        parts.append(" and ".join([*said, *(f"peers of {place}" for place in others)]))
    return " -> ".join(parts)


def _time_text(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds % length == 0:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:g} s"
