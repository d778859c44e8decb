"""Logs of `tiered-kv serve`: lines to read, or one JSON object a line for machines."""

import json
import logging
import re
from datetime import UTC, datetime
from typing import Final

from tiered_kv.errors import ConfigError

FORMATS: Final = ("text", "json")

_FIELD = re.compile(r"(?<=\s)([a-z][a-z0-9_]*)=(\S+)")
"""``name=value`` behind a message's first sentence, as every message of ours has it."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC, RFC 3339), ``level``, ``logger``, ``message``, ``pid``; ``error`` with a
    traceback; and the message's ``name=value`` pairs, as text, under their names unless these are taken.
    """

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
            "pid": record.process,
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        if record.name.partition(".")[0] == "tiered_kv":
            line = dict(_FIELD.findall(message)) | line
        return json.dumps(line, ensure_ascii=False)


def set_up(level_name: str, format_name: str) -> None:
    """Log to standard error.

    Raises:
        ConfigError: No such level or format.
    """
    level = logging.getLevelNamesMapping().get(level_name.upper())
    if level is None:
        raise ConfigError(f"option --log-level: expected debug, info, warning or error, got {level_name!r}")
    if format_name not in FORMATS:
        raise ConfigError(f"option --log-format: expected {' or '.join(FORMATS)}, got {format_name!r}")
    handler = logging.StreamHandler()
    as_text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if format_name == "json" else as_text)
    # Not below INFO for other libraries: what they say of their requests holds access keys and session tokens.
    logging.basicConfig(level=max(level, logging.INFO), handlers=[handler])
    logging.getLogger("tiered_kv").setLevel(level)
