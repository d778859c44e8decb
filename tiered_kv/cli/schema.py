"""Generate the JSON Schema of every verb's ``--json`` output from its types.

``python -m tiered_kv.cli.schema`` prints docs/cli-schema.json. Importing this imports every verb, which no verb needs.
"""

import inspect
import json
import sys
from importlib import import_module
from typing import Any

import msgspec

from tiered_kv.cli.app import MODULES, VERBS
from tiered_kv.ops.report import Report


def reports() -> dict[str, type[Report]]:
    """The type of each verb's output; verbs without one, such as ``serve``, are left out."""
    found: dict[str, type[Report]] = {}
    for verb in VERBS:
        module = import_module(MODULES.get(verb, f"tiered_kv.cli.{verb}"))
        kind = getattr(module, f"{verb.capitalize()}Report", None)
        if kind is not None:
            found[verb] = kind
    return found


def schema() -> dict[str, Any]:
    """One JSON Schema document; ``$defs`` hold the types, ``properties`` the verbs."""
    kinds = reports()
    parts, definitions = msgspec.json.schema_components(kinds.values(), ref_template="#/$defs/{name}")
    for definition in definitions.values():  # docstrings, which Python 3.13 has without their indentation
        if "description" in definition:
            definition["description"] = inspect.cleandoc(definition["description"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What tiered-kv prints with --json, by verb",
        "type": "object",
        "properties": dict(zip(kinds, parts, strict=True)),
        "$defs": definitions,
    }


if __name__ == "__main__":
    json.dump(schema(), sys.stdout, indent=2)
    sys.stdout.write("\n")
