"""The base of what verbs print with ``--json``. Each verb's report lies beside the code that fills it in."""

import msgspec


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what verbs print with ``--json``: one object per call, described by docs/cli-schema.json.

    Digests and keys are hex digits, sizes whole bytes, times seconds since 1970, what is unknown null. Fields are added
    and never change their meaning; ``version`` counts what breaks that promise.
    """

    version: int = 1
