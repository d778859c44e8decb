"""Compare what tiered_kv uses of vLLM with the vLLM that this Python imports, and print what an engine would say.

Ends with 1 where an engine would be refused. Called by scripts/test-next; usable by hand in any environment with vLLM.

Usage: python scripts/vllm_compat.py [VERSION THAT IS EXPECTED]
"""

import dataclasses
import importlib
import inspect
import sys

from tiered_kv.vllm.compat import GROUP_FIELDS, SPEC_FIELDS, SPECS, USES, differences, new_hooks, release, vllm_version
from tiered_kv.vllm.supported import SUPPORTED_SPECS


def main(expected: str | None) -> int:
    """Print the report."""
    version = vllm_version()
    if expected is not None and version.partition("+")[0] != expected:
        print(f"expected vLLM {expected}, imported {version}")
        return 1
    found = differences(release(version))
    fatal = [one for one in found if not one.use.without]
    print(f"vLLM {version}: {len(USES)} names compared, {len(found)} differ, {len(fatal)} of them refuse an engine")
    for one in found:
        print(f"  {one}" + (f" (without: {one.use.without})" if one.use.without else ""))
    for name in new_hooks():
        print(f"  new hook, left to vLLM: {name}")
    for name in sorted(new_fields()):
        print(f"  new field of a spec, refused where it is set: {name}")
    return 1 if fatal else 0


def new_fields() -> set[str]:
    """Fields of specs and groups that nobody has read."""
    specs = importlib.import_module(SPECS)
    known = dict.fromkeys(SUPPORTED_SPECS, SPEC_FIELDS) | {"KVCacheGroupSpec": GROUP_FIELDS}
    return {
        f"{name}.{field.name}"
        for name, fields in known.items()
        if inspect.isclass(owner := getattr(specs, name, None)) and dataclasses.is_dataclass(owner)
        for field in dataclasses.fields(owner)
        if field.name not in fields
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
