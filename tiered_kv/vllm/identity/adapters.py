"""Identity of LoRA adapters, by the content of the files that vLLM loaded.

Owns which adapters have an identity and what the scheduler side knows of them. Must not trust that a path still holds
the files that vLLM read: the workers note what they load (``loader_watch.py``) and report it with every step.

Conditions that make it right, whenever files are written:

    looking up     every rank holds the files that lie there now; or no rank has reported a load yet, and nothing has
                   touched the files since before this engine could have loaded any
    storing        every rank has reported that it loaded the very files the request's keys were made of
    both end for   an id whose adapter was replaced, and a name and path whose files changed, until the engine ends; and
                   for requests without an adapter where vLLM mixes them up with others (``mixes_up_adapters``)

Threads: none; the scheduler's.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import vllm

from tiered_kv.errors import TieredKVError
from tiered_kv.vllm.compat import OLDEST, release
from tiered_kv.vllm.identity.file_digests import digest_files, settle
from tiered_kv.vllm.identity.loader_watch import adapter_stamps, stamps_text

ADAPTER_FULL_BYTES: Final = 256 << 20
"""Adapters up to this size are hashed completely, once; vLLM reads them at the same moment anyway."""

MAX_ADAPTERS: Final = 1 << 14
"""Adapters remembered, half a KB each; beyond it requests with new ones are left alone, so that a stream of them cannot
fill memory."""

MAX_HELD: Final = 1 << 14
"""Ids remembered with what ranks loaded under them. vLLM counts a new one for each load that a client asks for; of
more, that which was loaded or asked for longest ago counts as held by no rank."""

CLOCKS_APART_NS: Final = 2_000_000_000
"""How far the clock of a file system that another machine serves may be from ours."""

ADAPTER_FLAGS: Final = ("enable_tower_connector_lora", "enable_mixed_moe_lora_format", "enable_moe_shared_loras")
"""Of vLLM's LoRA configuration: which layers an adapter is applied to, and as what its experts' tensors are read."""

PATHS_HASHED_FROM: Final = (0, 31)
"""First vLLM whose own prefix cache tells adapters of one name apart by their paths."""

_ADVICE: Final = "Load each version of an adapter from a directory of its own, under a name of its own"


class Unaccountable(TieredKVError):
    """A request depends on something that its keys do not name.

    It is neither looked up nor stored, and counted.
    """


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of one request, as its keys name it.

    Attributes:
        number: vLLM's id, under which workers hold it.
        path: Where the request says it lies.
        stamps: Stamps of the files that ``identity`` was made of, in the form in which workers report them.
        changed_ns: When one of the files was last touched.
    """

    number: int
    name: str
    path: str
    stamps: str
    changed_ns: int
    identity: str


@dataclass(slots=True)
class _Seen:
    """An adapter as it was when a request named it first.

    Attributes:
        stamps: Of its files, as a text.
        digest: Of their contents; empty: they were not read yet.
    """

    stamps: str
    digest: str = ""


def adapter_numerics(vllm_config: Any) -> str:
    """The settings of vLLM that decide how an adapter changes KV, as text; empty without LoRA.

    Not in it are sizes, and sharding, which is rounding (``config_fields.py``). KV without an adapter is the same with
    LoRA and without it, so none of this is in the namespace.
    """
    lora = vllm_config.lora_config
    if lora is None:
        return ""
    modules = None if lora.target_modules is None else sorted(set(lora.target_modules))
    flags = {name: bool(getattr(lora, name, False)) for name in ADAPTER_FLAGS}
    return json.dumps({"dtype": str(lora.lora_dtype), "modules": modules} | flags, sort_keys=True)


def mixes_up_adapters(vllm_config: Any) -> bool:
    """Whether vLLM computes requests without an adapter with another request's, in steps that have both.

    Its CPU build does (0.32): there "no adapter" is the index -1, and so the adapter in the last place.
    """
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", "cpu")
    return vllm_config.lora_config is not None and device == "cpu"


class Adapters:
    """Identities of LoRA adapters, and which of them workers hold.

    Only its own methods write its fields. Threads: vLLM's scheduler thread only.
    """

    def __init__(
        self,
        numerics: str,
        world_size: int = 1,
        wall_ns: Callable[[], int] = time.time_ns,
        *,
        mixes_up: bool = False,
    ) -> None:
        """Take how vLLM applies adapters (``adapter_numerics``), and how many ranks load each of them.

        ``mixes_up``: see ``mixes_up_adapters``.
        """
        self._numerics = numerics
        self._mixes_up = mixes_up
        self._has_mixed_up = False
        self._world_size = world_size
        self._wall_ns = wall_ns
        self._started_ns = wall_ns()
        self._started_monotonic_ns = time.monotonic_ns()
        self._first_seen: dict[tuple[str, ...], _Seen] = {}
        self._held: OrderedDict[int, dict[int, str]] = OrderedDict()  # by id, that of the newest load or request last
        self._replaced: set[int] = set()

    def identity(self, lora_request: Any) -> Adapter:
        """Identify an adapter by its weights, not by its name or path.

        Raises:
            Unaccountable: Its files cannot be read here, have changed, or are not those that vLLM loaded.
        """
        name, path, number = lora_request.lora_name, str(lora_request.lora_path), int(lora_request.lora_int_id)
        if getattr(lora_request, "tensorizer_config_dict", None):  # of vLLM before 0.32
            raise Unaccountable(f"adapter's tensors are read by tensorizer, from elsewhere. adapter={name}")
        stamps = adapter_stamps(path)
        if not stamps:
            raise Unaccountable(f"adapter's files cannot be read. adapter={name}")
        # What vLLM's own prefix cache takes for one adapter: after a change it may still hold the old one's blocks.
        key = (name, path) if release(vllm.__version__, OLDEST) >= PATHS_HASHED_FROM else (name,)
        if key not in self._first_seen and len(self._first_seen) >= MAX_ADAPTERS:
            raise Unaccountable(f"too many adapters. limit={MAX_ADAPTERS}")
        text = stamps_text(stamps)
        if key not in self._first_seen:
            settle(stamps)
            self._first_seen[key] = _Seen(text)
        seen = self._first_seen[key]
        if seen.stamps != text:
            raise Unaccountable(f"adapter's files changed while vLLM runs. {_ADVICE}. adapter={name}")
        if not seen.digest:
            try:
                seen.digest = digest_files(stamps, ADAPTER_FULL_BYTES)
            except OSError as exc:
                raise Unaccountable(f"adapter's files cannot be read. adapter={name}") from exc
        fused = int(getattr(lora_request, "is_3d_lora_weight", False))
        identity = f"{seen.digest} {self._numerics} fused_experts={fused}"
        changed_ns = max(stamp.ctime_ns for stamp in stamps)
        found = Adapter(number, name, path, text, changed_ns, identity)
        self.check(found)
        if number in self._held:
            self._held.move_to_end(number)
        return found

    def check(self, adapter: Adapter) -> None:
        """See that no rank holds, or has held, other files under the adapter's id than those of its identity.

        Raises:
            Unaccountable: One does or did.
        """
        if adapter.number in self._replaced:
            raise Unaccountable(f"adapter was replaced while vLLM runs. {_ADVICE}. adapter={adapter.name}")
        if any(stamps != adapter.stamps for stamps in self._held.get(adapter.number, {}).values()):
            raise Unaccountable(
                "adapter's files are not those that vLLM loaded: they were written later, or meanwhile. "
                f"{_ADVICE}. adapter={adapter.name}"
            )

    def take_step(self, have_adapters: Iterable[bool]) -> bool:
        """Take which requests of vLLM's next step have an adapter; call it before anything of that step is stored.

        Returns whether this is the first step that mixes them up. From then on vLLM's own cache may have blocks of
        such a step, which any later request without an adapter may find.
        """
        if not self._mixes_up or self._has_mixed_up:
            return False
        self._has_mixed_up = len(set(have_adapters)) > 1
        return self._has_mixed_up

    def check_base(self) -> None:
        """See that vLLM has computed requests without an adapter as such.

        Raises:
            Unaccountable: It may not have.
        """
        if self._has_mixed_up:
            raise Unaccountable(
                "vLLM's CPU build computes requests without a LoRA adapter with that of others in the same step, and "
                "has had such a step. Serve the base model from an engine of its own"
            )

    def is_held(self, adapter: Adapter) -> bool:
        """Whether every rank has reported that it loaded the files of the adapter's identity, and nothing else."""
        held = self._held.get(adapter.number, {})
        is_everywhere = len(held) == self._world_size and all(stamps == adapter.stamps for stamps in held.values())
        return is_everywhere and adapter.number not in self._replaced

    def may_look_up(self, adapter: Adapter) -> bool:
        """Whether KV stored for this identity fits the adapter that ranks hold, or will load for this request."""
        if stamps_text(adapter_stamps(adapter.path)) != adapter.stamps:
            return False
        if self._held.get(adapter.number):
            return self.is_held(adapter)
        # An add_lora may not have been reported yet, since that needs a step; older files were the same then.
        return adapter.changed_ns < self._began_ns() - CLOCKS_APART_NS

    def _began_ns(self) -> int:
        """When this engine began, by the clock as it goes now: one that was set back dates new files before that."""
        return min(self._started_ns, self._wall_ns() - (time.monotonic_ns() - self._started_monotonic_ns))

    def take_reports(self, loads: Mapping[int, Mapping[int, str]]) -> bool:
        """Take the ranks' reports of loads: by adapter's id and rank the stamps of the files, "" for changed ones.

        Returns whether one replaced another: KV on its way to the cache may then be of either.
        """
        is_any_replaced = False
        for number, by_rank in loads.items():
            held = self._held.setdefault(number, {})
            self._held.move_to_end(number)
            if len(self._held) > MAX_HELD:
                self._held.popitem(last=False)
            for rank, stamps in by_rank.items():
                if held.setdefault(rank, stamps) != stamps:
                    held[rank] = stamps
                    self._replaced.add(number)
                    is_any_replaced = True
        return is_any_replaced
