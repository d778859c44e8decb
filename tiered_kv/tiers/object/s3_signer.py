"""botocore's own client, set up as s3fs sets up its own, for bodies that threads move.

Owns which settings of a location threads can honour, the comparison of the two clients, and how credentials get from
s3fs' session to here. Called by ``s3.py``.
"""

import ssl
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from botocore import UNSIGNED
from botocore import __version__ as botocore_version
from botocore.config import Config
from botocore.credentials import CredentialProvider, CredentialResolver, Credentials, ReadOnlyCredentials
from botocore.exceptions import NoCredentialsError
from botocore.httpsession import get_cert_path
from botocore.session import Session
from botocore.utils import get_environ_proxies

from tiered_kv.tiers.object.loop_calls import LoopCalls, follow_no_blind_redirect
from tiered_kv.tiers.object.medium import Deadline
from tiered_kv.version import __version__

FRESH_S: Final = 5.0
"""The loop is asked for credentials again after this, which costs a turn of it; ``renewal.py`` renews them."""

_KEYS: Final = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")


class UnfitError(Exception):
    """Threads cannot honour a setting of the location; the message names it and shows no value."""


def open_client(calls: LoopCalls) -> Any:
    """A client that signs, resolves and retries as that of ``calls`` does.

    Raises:
        UnfitError: It would not be the same, or threads cannot do what is set.
    """
    filesystem = calls.filesystem
    settings: dict[str, Any] = {"use_ssl": filesystem.use_ssl, **_given(filesystem), **filesystem.client_kwargs}
    config = dict(filesystem.config_kwargs)
    if filesystem.anon:
        config["signature_version"] = UNSIGNED
        settings = {name: value for name, value in settings.items() if name not in _KEYS}
    # One that is given is sent as it is; botocore composes its own twice per request, 0.3 ms.
    config.setdefault("user_agent", f"tiered_kv/{__version__} botocore/{botocore_version}")
    try:
        made = Config(**config)
    except TypeError as exc:
        raise UnfitError("config_kwargs has an option of s3fs' own client") from exc
    _refuse_unfit(made, filesystem.s3_additional_kwargs)
    session = Session(**filesystem.kwargs)
    if not filesystem.anon and not settings.get("aws_access_key_id"):
        session.register_component("credential_provider", CredentialResolver([_Provider(calls)]))
    client = session.create_client("s3", config=made, **settings)
    follow_no_blind_redirect(client)
    try:
        _refuse_proxied(client)
        _refuse_different(client.meta, calls.run(calls.client()).meta)
    except BaseException:
        client.close()
        raise
    return client


def tls_context(filesystem: Any, client: Any) -> ssl.SSLContext:
    """What https connections verify and present, from the same settings as botocore's own.

    Raises:
        OSError: A file of certificates or keys is not there or not one.
    """
    verify = filesystem.client_kwargs.get("verify")
    if verify is None:
        verify = Session(**filesystem.kwargs).get_config_variable("ca_bundle")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.load_verify_locations(get_cert_path(True if verify is None else verify))
    presented = client.meta.config.client_cert
    if presented is not None:
        context.load_cert_chain(*((presented,) if isinstance(presented, str) else presented))
    return context


def _given(filesystem: Any) -> dict[str, Any]:
    """What the location itself says of credentials and the endpoint."""
    given = dict(zip(_KEYS, (filesystem.key, filesystem.secret, filesystem.token), strict=True))
    return {name: value for name, value in {**given, "endpoint_url": filesystem.endpoint_url}.items() if value}


def _refuse_unfit(config: Any, additional: Mapping[str, object]) -> None:
    """Refuse settings under which botocore wraps bodies, or waits in ways that no deadline of ours bounds."""
    if (config.retries or {}).get("mode") == "adaptive":
        raise UnfitError("retries are adaptive")
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        if getattr(config, name) != "when_required":
            raise UnfitError(f"{name} is set")
    checksums = sorted(name for name in additional if name.startswith("Checksum"))
    if checksums:
        raise UnfitError(f"s3_additional_kwargs has {checksums[0]}")


def _refuse_proxied(client: Any) -> None:
    url = client.meta.endpoint_url.lstrip()
    proxies = client.meta.config.proxies
    proxies = get_environ_proxies(url) if proxies is None else proxies
    if proxies.get(urlsplit(url).scheme) or proxies.get("all"):
        raise UnfitError("there is a proxy")


def _refuse_different(ours: Any, theirs: Any) -> None:
    """Refuse to differ from s3fs' client in what decides where a request goes and how it is signed."""
    facts: dict[str, Callable[[Any], object]] = {
        "endpoint": lambda meta: meta.endpoint_url,
        "region": lambda meta: meta.region_name,
        "signature": lambda meta: meta.config.signature_version,
        "addressing": lambda meta: meta.config.s3,
        "API": lambda meta: meta.service_model.api_version,
    }
    for name, fact in facts.items():
        if fact(ours) != fact(theirs):
            raise UnfitError(f"s3fs' client has another {name}")


class _Provider(CredentialProvider):  # type: ignore[misc]
    """Finds whatever s3fs' session finds, once it is needed."""

    METHOD = "tiered-kv-s3fs"

    def __init__(self, calls: LoopCalls) -> None:
        super().__init__()
        self._calls = calls

    def load(self) -> Credentials:
        return LoopCredentials(self._calls)


class LoopCredentials(Credentials):  # type: ignore[misc]
    """The credentials of s3fs' session, renewed on its loop within the deadline of one call.

    Threads: any; several may ask the loop at once, and botocore's lock there lets one renew.

    Raises:
        NoCredentialsError: There are none.
        NoIdentity: They could not be found or renewed.
        TimeoutError: They did not come in time.
    """

    def __init__(self, calls: LoopCalls) -> None:
        super().__init__("", "")
        self._calls = calls
        self._fresh: tuple[ReadOnlyCredentials, Deadline] | None = None

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        fresh = self._fresh
        if fresh is None or fresh[1].left_s() <= 0:
            found, fresh_s = self._calls.run(self._ask())
            if found is None:
                raise NoCredentialsError
            self._fresh = fresh = (found, Deadline(fresh_s))
        return fresh[0]

    async def _ask(self) -> tuple[ReadOnlyCredentials | None, float]:
        """What is in force, and for how long that need not be asked again: not beyond its end."""
        await self._calls.client()
        found: ReadOnlyCredentials | None = await self._calls.credentials()
        return found, 0.0 if self._calls.credentials_end_within(FRESH_S) else FRESH_S
