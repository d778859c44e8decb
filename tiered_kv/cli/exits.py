"""Exit codes of `tiered-kv`: part of its interface. Imports nothing: ``--help`` shows them."""

from typing import Final

EXIT_UNAVAILABLE: Final = 1
EXIT_SETTINGS: Final = 2
EXIT_LOCKED: Final = 3
EXIT_FOUND: Final = 4
EXIT_UNCONFIRMED: Final = 5

EXIT_CODES: Final = (
    "Exit codes: 0 done; 1 the storage or the server cannot be reached; 2 a setting or an argument is wrong; "
    "3 another server or command owns the directory; 4 a check found something wrong, an erasure is not complete, "
    "chunks could not be deleted, or none could be copied; 5 not confirmed, nothing changed; 130 interrupted."
)
