"""`tiered-kv config`: every setting with its default, made from the settings' own help."""

import msgspec

from tiered_kv.cli.app import app
from tiered_kv.cli.exits import EXIT_CODES
from tiered_kv.cli.options import AsJson
from tiered_kv.cli.output import exit_codes, print_json, print_table
from tiered_kv.config import Config
from tiered_kv.ops.report import Report


class ConfigSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting.

    Attributes:
        name: As it is written in ``kv_connector_extra_config`` and after ``--set``.
        default: As people write it; empty where there is none or it depends on the machine: then ``help`` says it.
        help: One line.
    """

    name: str
    default: str
    help: str


class ConfigReport(Report, frozen=True, kw_only=True):
    """What ``config`` lists.

    Attributes:
        settings: Every setting there is, in the order of the documentation.
    """

    settings: list[ConfigSetting]


@app.command(epilog=EXIT_CODES)
def config(as_json: AsJson = False) -> None:
    """List the settings of vLLM's kv_connector_extra_config and of the server, with defaults.

    The list is made from the definitions that check the settings, so it is complete and true for this version. Each
    of them may stand in kv_connector_extra_config, and be given to other verbs as --set NAME=VALUE. Sizes are numbers
    of bytes or texts such as 4GiB; storage_ttl is a number of seconds or a text such as 7d. `tiered-kv doctor` checks
    a whole configuration.
    """
    with exit_codes():
        settings = Config.settings()
        if as_json:
            print_json(
                ConfigReport(settings=[ConfigSetting(name=s.name, default=s.default, help=s.help) for s in settings])
            )
        else:
            print_table("", ("setting", "default", "meaning"), [(s.name, s.default or "-", s.help) for s in settings])
