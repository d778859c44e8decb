"""Check the text that a user passes to vLLM: ``--kv-transfer-config`` or our part of it.

Reads nothing but that text. Values are shown as ``Config`` shows them, so secrets are not; of JSON that cannot be read
nothing is shown but the place.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from tiered_kv.config import OFFLOADING_HOST_BYTES, OFFLOADING_ROWS, Config, size_text
from tiered_kv.errors import ConfigError
from tiered_kv.ops.findings import DoctorFinding, error, ok, warning

CONNECTOR: Final = "TieredKVConnector"
MODULE: Final = "tiered_kv.vllm"
ROLES: Final = {
    "kv_both": "loads and stores",
    "kv_producer": "stores only: what is here is never loaded",
    "kv_consumer": "loads only: what it computes is never stored",
}
TRANSFER_FIELDS: Final = (
    "kv_connector",
    "kv_role",
    "kv_connector_extra_config",
    "kv_connector_module_path",
    "kv_load_failure_policy",
    "engine_id",
    "kv_buffer_device",
    "kv_port",
    "enable_permute_local_kv",
)
"""What every vLLM from 0.30 on takes; any other name ends its start."""

POLICIES: Final = ("recompute", "fail")
"""What ``kv_load_failure_policy`` may be."""

OLD_FIELDS: Final = ("kv_rank", "kv_parallel_size", "kv_ip", "kv_buffer_size")
"""Fields of vLLM 0.30 that later ones refuse."""

SEVERAL: Final = "MultiConnector"
"""vLLM's own, which has several others below it."""

OFFLOADING: Final = "OffloadingConnector"
"""vLLM's own, below which a tier of ours can be."""

TIERING: Final = "TieringOffloadingSpec"
TIER: Final = "TieredKVTier"
TIER_MODULE: Final = "tiered_kv.vllm.offloading"
TIER_WORDS: Final = ("type", "module_path", "locality", "enable_kv_events", "backpressure")
"""What stands beside our settings in the description of a tier, and is vLLM's."""

BESIDE_TIERS: Final = (
    "spec_name",
    "spec_module_path",
    "secondary_tiers",
    "cpu_bytes_to_use",
    "block_size",
    "blocks_per_chunk",
    "canonical_layout",
    "offload_prompt_only",
    "eviction_policy",
    "cache_policy_module_path",
    "backpressure",
    "self_describing_kv_events",
    "store_threshold",
    "max_tracker_size",
)
"""What vLLM 0.32's offloading reads of its ``kv_connector_extra_config``; it passes over any other name."""

FLAGS: Final = ("canonical_layout", "offload_prompt_only", "self_describing_kv_events", "enable_kv_events")
"""Of these and of a tier's words those that are yes or no; vLLM takes any text for yes."""

EVICTION_POLICIES: Final = ("lru", "arc")
LOCALITIES: Final = ("LOCAL", "REMOTE")

LISTED: Final = "`tiered-kv config` lists the settings"

WITH_OTHERS: Final = ("storage_uri", "storage_options", "peers", "peer_listen", "peer_key_file", "peer_serve_bytes_s")
"""Settings that cannot be judged one by one."""


@dataclass(slots=True)
class Given:
    """Our settings in a text, as far as it can be parsed.

    Attributes:
        settings: Of ours, unchecked; None where the text cannot be read as far as that.
        is_whole: The text was a whole ``--kv-transfer-config``.
        is_tier: They are those of a tier below vLLM's own offloading.
        findings: What the checks say of it so far.
    """

    settings: dict[str, object] | None = None
    is_whole: bool = False
    is_tier: bool = False
    findings: list[DoctorFinding] = field(default_factory=list)


def read_text(text: str) -> Given:
    """Find our settings in what is passed to vLLM, and check what stands around them."""
    given = Given()
    try:
        whole = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as exc:
        where = f"line {exc.lineno}, column {exc.colno}: {exc.msg}" if isinstance(exc, json.JSONDecodeError) else exc
        given.findings.append(error("json", f"this is no JSON: {where}", "mind quotes, commas and the shell's quoting"))
        return given
    except RecursionError:
        given.findings.append(error("json", "this is JSON nested too deep", "pass what vLLM gets"))
        return given
    if not isinstance(whole, dict):
        given.findings.append(
            error(
                "json", f"expected an object, got {_kind(whole)}", 'e.g. {"storage_uri": "file:///var/cache/tiered_kv"}'
            )
        )
        return given
    given.findings.append(ok("json", "it can be read"))
    given.is_whole = any(str(name).startswith("kv_") for name in whole)
    if given.is_whole:
        _read_transfer(given, whole)
    else:
        given.settings = whole
    return given


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a value that JSON has")


def _kind(value: object) -> str:
    names = {str: "a text", list: "a list", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _read_transfer(given: Given, whole: Mapping[str, object]) -> None:
    """Take a whole ``--kv-transfer-config`` apart."""
    given.findings += _fields(whole)
    policy, is_of_several = whole.get("kv_load_failure_policy"), whole.get("kv_connector") == SEVERAL
    if is_of_several:
        given.findings += [*_vllms_own(whole), *_roles_of_several(whole)]
        of_several = _of_several(given, whole)
        if of_several is None:
            return
        whole = of_several
    else:
        given.findings.append(_role(whole))
    if whole.get("kv_connector") == OFFLOADING:
        given.findings += [*_vllms_own(whole), *_policy_of_offloading(policy)]
        _read_offloading(given, whole.get("kv_connector_extra_config"))
        return
    given.findings.append(_connector(whole))
    if not whole:
        return
    given.findings.append(_policy(policy, is_of_several=is_of_several))
    extra = whole.get("kv_connector_extra_config", {})
    if isinstance(extra, dict):
        given.settings = extra
    else:
        given.findings.append(
            error(
                "settings",
                f"kv_connector_extra_config: expected an object, got {_kind(extra)}",
                "put our settings there",
            )
        )


def _fields(whole: Mapping[str, object], where: str = "") -> list[DoctorFinding]:
    """What of a connector's description vLLM does not know; ``where`` it stands, if not outermost."""
    findings = []
    for name in whole:
        if name in OLD_FIELDS:
            text = f"{where}{name} is refused by vLLM after 0.30 and does nothing here"
            findings.append(warning("connector", text, "leave it out"))
        elif name not in TRANSFER_FIELDS:
            near = difflib.get_close_matches(name, TRANSFER_FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else "our settings belong into kv_connector_extra_config"
            text = f"{where}vLLM knows no field {name[:100]!r} here and does not start"
            findings.append(error("connector", text, hint))
    return findings


def _vllms_own(whole: Mapping[str, object]) -> list[DoctorFinding]:
    """A module for a connector that is vLLM's own: it would be looked for there, and nowhere else."""
    module = whole.get("kv_connector_module_path")
    if module is None:
        return []
    text = f"kv_connector_module_path is {str(module)[:100]!r}: vLLM looks for {whole.get('kv_connector')} there"
    return [error("connector", f"{text} and does not start", "leave it out")]


def _read_offloading(given: Given, extra: object) -> None:
    """Take vLLM's own offloading apart: what is around our tier, and our settings in it."""
    if not isinstance(extra, dict):
        text = f"kv_connector_extra_config: expected an object, got {_kind(extra)}"
        given.findings.append(error("connector", text, f'"spec_name": "{TIERING}", "secondary_tiers": [...]'))
        return
    ours = _tiers(extra)
    if not ours:
        hint = f'"secondary_tiers": [{{"type": "{TIER}", "module_path": "{TIER_MODULE}", "storage_uri": ...}}]'
        text = f"{OFFLOADING} names no tier of ours: nothing of tiered_kv is used"
        given.findings.append(error("connector", text, f'{hint}, or "kv_connector": "{CONNECTOR}"'))
        return
    if len(ours) > 1:
        given.findings.append(warning("connector", f"{len(ours)} tiers are {TIER}; the first is checked"))
    tier = ours[0]
    given.findings.append(_tier(tier, extra.get("spec_name")))
    given.findings.append(_rows(extra))
    given.findings += [*_beside_tiers(extra), *_vllms_words(extra, tier)]
    given.settings, given.is_tier = {name: value for name, value in tier.items() if name not in TIER_WORDS}, True
    if "chunk_tokens" in given.settings:
        del given.settings["chunk_tokens"]
        text = "chunk_tokens is none of a tier's settings, and vLLM does not start: a chunk is a row"
        given.findings.append(error("settings", text, "set block_size beside secondary_tiers"))


def _tiers(extra: object) -> list[dict[str, object]]:
    """The tiers of ours below vLLM's own offloading."""
    named = extra.get("secondary_tiers") if isinstance(extra, dict) else None
    tiers = [one for one in (named if isinstance(named, list) else []) if isinstance(one, dict)]
    return [one for one in tiers if one.get("type") == TIER or one.get("module_path") == TIER_MODULE]


def _tier(tier: Mapping[str, object], spec: object) -> DoctorFinding:
    if tier.get("type") != TIER or tier.get("module_path") != TIER_MODULE:
        found = f"type {str(tier.get('type'))[:100]!r}, module_path {str(tier.get('module_path'))[:100]!r}"
        return error("connector", f"vLLM does not find our tier: {found}", f'"{TIER}" and "{TIER_MODULE}"')
    if spec != TIERING:
        found = "there is none" if spec is None else f"it is {str(spec)[:100]!r}"
        return error("connector", f"expected spec_name {TIERING}, and {found}", f'"spec_name": "{TIERING}"')
    return ok("connector", f"{TIER} below {OFFLOADING}: which models, docs/offloading.md")


def _rows(extra: Mapping[str, object]) -> DoctorFinding:
    """What vLLM's own layer takes, and how large the rows are that ours gets."""
    size = _whole(extra.get("cpu_bytes_to_use"))
    if size is None:
        return error("rows", "cpu_bytes_to_use is not a number of bytes", "vLLM's host memory: 34359738368 is 32 GiB")
    takes = f"vLLM takes {size / (1 << 30):.1f} GiB of host memory per engine, beside host_bytes of our server"
    named = [name for name in ("block_size", "blocks_per_chunk") if extra.get(name) is not None]
    if len(named) > 1:
        return error("rows", "block_size and blocks_per_chunk are named, and vLLM does not start", "leave out one")
    for name in named:
        if _whole(extra[name]) is None:
            return error("rows", f"{name} is not a number above zero, and vLLM does not start", f'"{name}": 256')
    if not named:
        wanted = '"block_size": 256; for a model with windows or recurrent layers a larger --block-size instead'
        return warning("rows", f"{takes}; a row is one GPU block: many small files", wanted)
    return ok("rows", takes)


def _beside_tiers(extra: Mapping[str, object]) -> list[DoctorFinding]:
    """Names that vLLM passes over: a misspelled one is as none at all."""
    findings = []
    for name in extra:
        if name in BESIDE_TIERS:
            continue
        near = difflib.get_close_matches(name, BESIDE_TIERS, n=1)
        is_ours = name in {one.name for one in fields(Config)}
        hint = f"did you mean {near[0]}?" if near else "leave it out"
        hint = f"put it into the description of the tier that is {TIER}" if is_ours else hint
        text = f"{name[:100]!r} beside secondary_tiers has no effect: vLLM's offloading knows no such name"
        findings.append(warning("connector", text, hint))
    return findings


def _vllms_words(extra: Mapping[str, object], tier: Mapping[str, object]) -> list[DoctorFinding]:
    """Values that end vLLM's start, or that it takes for something else."""
    findings = []
    if (_whole(extra.get("store_threshold")) or 0) > 1:
        text = f"store_threshold is none of {TIERING}'s settings, and vLLM does not start"
        findings.append(error("connector", text, "leave it out; disk_admission second-touch writes what is asked for"))
    policy = extra.get("eviction_policy", EVICTION_POLICIES[0])
    if policy not in EVICTION_POLICIES and extra.get("cache_policy_module_path") is None:
        text = f"eviction_policy is {str(policy)[:100]!r}, and vLLM does not start"
        findings.append(error("connector", text, f"one of {', '.join(EVICTION_POLICIES)}"))
    if tier.get("locality") not in (None, *LOCALITIES):
        text = f"locality is {str(tier['locality'])[:100]!r}, and vLLM does not start"
        findings.append(error("connector", text, f"one of {', '.join(LOCALITIES)}, or leave it out"))
    given = [one.get("backpressure") or {} for one in (extra, tier)]
    is_given = any(given) or "backpressure" in tier
    if is_given and not any(isinstance(one, dict) and one.get("backpressure_cls") for one in given):
        text = "backpressure names no backpressure_cls, and vLLM does not start"
        findings.append(error("connector", text, '"backpressure_cls": "EMABackpressureDetector"'))
    for name, value in ((name, one[name]) for one in (extra, tier) for name in FLAGS if name in one):
        if not isinstance(value, bool):
            text = f"{name} is {_kind(value)}, of which vLLM takes all but an empty text and 0 for true"
            findings.append(warning("connector", text, f'"{name}": true or false'))
    return findings


def _whole(value: object) -> int | None:
    """A number as vLLM reads it, which takes texts, too; None where it is none above zero."""
    try:
        number = int(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else 0
    except (ValueError, OverflowError):
        return None
    return number if number > 0 else None


def check_host_default(config: Config) -> list[DoctorFinding]:
    """What a tier below vLLM's offloading has of host memory if nobody says it."""
    if config.host_bytes is not None:
        return []
    host_bytes = config.resolved_host_bytes()
    more = f", more where {OFFLOADING_ROWS} rows need it" if host_bytes == OFFLOADING_HOST_BYTES else ""
    text = (
        f"host_bytes is not named: a server that this engine starts takes up to {size_text(host_bytes)}{more}; "
        f"one that runs keeps its own. Name it where a {CONNECTOR} shares the directory"
    )
    return [ok("host memory", text)]


def _several(whole: Mapping[str, object]) -> list[dict[str, object]]:
    """The connectors of vLLM's MultiConnector."""
    extra = whole.get("kv_connector_extra_config")
    connectors = extra.get("connectors") if isinstance(extra, dict) else None
    return [one for one in (connectors if isinstance(connectors, list) else []) if isinstance(one, dict)]


def _of_several(given: Given, whole: Mapping[str, object]) -> Mapping[str, object] | None:
    """Ours among the connectors of vLLM's MultiConnector; empty when there is none, None when that has been said."""
    connectors = _several(whole)
    ours = [one for one in connectors if one.get("kv_connector") == CONNECTOR]
    if len(ours) > 1:
        given.findings.append(warning("connector", f"{len(ours)} connectors are {CONNECTOR}; the first is checked"))
    if any(_tiers(one.get("kv_connector_extra_config")) for one in connectors if one.get("kv_connector") == OFFLOADING):
        text = f"a {TIER} below {OFFLOADING} below {SEVERAL} never joins its server: it finds and stores nothing"
        hint = f'"kv_connector": "{OFFLOADING}" outermost, or {CONNECTOR} in its place'
        given.findings.append(error("connector", text, hint))
        return ours[0] if ours else None
    return ours[0] if ours else {}


def _roles_of_several(whole: Mapping[str, object]) -> list[DoctorFinding]:
    """Fields and roles, which vLLM checks in each connector of a MultiConnector; in it the role has no effect."""
    findings = [bad] if (bad := _role(whole)).status == "error" else []
    for one in _several(whole):
        name = str(one.get("kv_connector"))[:100]
        where = f"{name} in {SEVERAL}: "
        findings += _fields(one, where)
        role = _role(one, where)
        if role.status == "error" or name in (CONNECTOR, OFFLOADING):
            findings.append(role)
        if "engine_id" in one:
            text = f"{where}vLLM gives it an engine_id by itself and does not start with another"
            findings.append(error("connector", text, f"name engine_id beside {SEVERAL}, or leave it out"))
    return findings


def _connector(whole: Mapping[str, object]) -> DoctorFinding:
    name, module = whole.get("kv_connector"), whole.get("kv_connector_module_path")
    if name != CONNECTOR:
        found = "there is none" if name is None else f"it is {str(name)[:100]!r}"
        return error("connector", f"expected kv_connector {CONNECTOR}, and {found}", f'"kv_connector": "{CONNECTOR}"')
    if module is not None and module not in (MODULE, f"{MODULE}.connector"):
        return error(
            "connector", f"kv_connector_module_path is {str(module)[:100]!r}", f'leave it out, or say "{MODULE}"'
        )
    return ok("connector", f"kv_connector is {CONNECTOR}")


def _role(whole: Mapping[str, object], where: str = "") -> DoctorFinding:
    role = whole.get("kv_role")
    if role is None:
        text = f"{where}there is no kv_role, without which vLLM does not start"
        return error("role", text, '"kv_role": "kv_both"')
    if not isinstance(role, str) or role not in ROLES:
        near = difflib.get_close_matches(str(role), ROLES, n=1)
        text = f"{where}kv_role is {str(role)[:100]!r}"
        return error("role", text, f'"kv_role": "{near[0] if near else "kv_both"}"')
    if role == "kv_both":
        return ok("role", f"{where}{role}: the engine {ROLES[role]}")
    if whole.get("kv_connector") == OFFLOADING:
        return warning("role", f"{where}{role} has no effect: {OFFLOADING} loads and stores", '"kv_role": "kv_both"')
    return warning("role", f"{where}{role}: the engine {ROLES[role]}", '"kv_role": "kv_both" does both')


def _policy_of_offloading(policy: object) -> list[DoctorFinding]:
    """vLLM's offloading reports no load as failed, so all that counts is that vLLM takes the word."""
    return [] if policy in (None, *POLICIES) else [_policy(policy, is_of_several=False)]


def _policy(policy: object, *, is_of_several: bool) -> DoctorFinding:
    if is_of_several and policy in (None, "fail"):
        return warning(
            "load failures",
            "a request whose load fails ends with an error: vLLM reads the policy of MultiConnector, not ours",
            '"kv_load_failure_policy": "recompute" beside "kv_connector": "MultiConnector"',
        )
    if policy in (None, "recompute"):
        return ok("load failures", "a load that fails is computed again (the connector sees to it)")
    if policy == "fail":
        return warning(
            "load failures",
            "kv_load_failure_policy fail has no effect: the connector sets it to recompute",
            "leave it out",
        )
    return error("load failures", "kv_load_failure_policy is neither recompute nor fail", "leave it out")


def check_settings(settings: Mapping[str, object]) -> tuple[Config | None, list[DoctorFinding]]:
    """Validate our settings, with one finding for each wrong one."""
    known = {one.name for one in Config.settings()}
    findings: list[DoctorFinding] = []
    for name, value in settings.items():
        if name in WITH_OTHERS:
            continue
        base: dict[str, object] = {"storage_uri": "memory://doctor", "disk_path": "/doctor"}
        try:
            Config.from_mapping(base | {name: value})
        except ConfigError as exc:
            if name in known:
                findings.append(error("settings", str(exc), LISTED))
            else:
                text, _, hint = str(exc).partition("; ")
                findings.append(error("settings", text, hint.partition(" known settings:")[0] or LISTED))
    if findings:
        return None, findings
    try:
        config = Config.from_mapping(settings)
    except ConfigError as exc:
        return None, [error("settings", str(exc), LISTED)]
    count = len([value for value in settings.values() if value is not None])
    findings = [ok("settings", f"{count} setting{'' if count == 1 else 's'}, all valid")]
    findings += [warning("settings", text) for text in config.warnings()]
    if config.single_writer and config.storage_bytes is None and config.storage_ttl is None:
        findings.append(warning("settings", "single_writer has no effect without storage_bytes or storage_ttl"))
    return config, findings
