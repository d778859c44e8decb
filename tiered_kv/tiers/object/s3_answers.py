"""What S3's answers mean, for both ways to ask.

Owns the range a get asks for, how often a create is tried, and whose word an answer is. Called by ``s3.py``,
``loop_calls.py``, ``loop_bodies.py`` and ``thread_bodies.py``.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any, Final

from tiered_kv.tiers.object.errors import NotAStore, chain, code_of, headers_of, is_page, status_of
from tiered_kv.tiers.object.marks import Marks

CREATE_TRIES: Final = 3
CONFLICT_WAIT_S: Final = 0.05

_LIST_FIELDS: Final = frozenset({"Name", "IsTruncated", "Contents", "KeyCount"})
"""Of which every server sends some; botocore takes any other XML, a page for people too, for an empty list."""


OF_STORES: Final = frozenset({"etag", "x-amz-request-id", "x-amz-id-2"})
"""By which an answer that succeeds may be known (``marks.py``)."""

_OF_S3: Final = frozenset({"x-amz-request-id", "x-amz-id-2", "x-amz-delete-marker"})
"""Of each answer, or of one about an object that was deleted. A network before the store adds others that begin so."""

_IS_RESULT: Final = "tiered_kv:is-result"
"""Beside what botocore parsed of a batch's answer: whether that was one."""


def refuse_nobodys(exc: BaseException, method: str) -> None:
    """Tell a 404 that no store says from one that does.

    A load balancer without a server behind it says 404 to everything. Taken for the store's word it would tell of no
    blob, no lease and no epoch, and end a list. A store says a code with it, but to a HEAD, whose answer has no body
    (:func:`is_by_a_store`).

    Raises:
        NotAStore: This refusal of a client's ``method`` has none.
    """
    if status_of(exc) == 404 and code_of(exc) in ("", "404") and method != "head_object":
        raise NotAStore("a 404 without a code") from exc


def is_by_a_store(exc: BaseException) -> bool:
    """Whether a refusal has a header of S3's own, as that of most stores has."""
    return bool(_OF_S3 & headers_of(exc).keys())


def first_bytes(length: int) -> str:
    """The range of a get. Also for the whole: Ceph's gateway sends that a tenth sooner (docs/decisions/0006)."""
    return f"bytes=0-{length - 1}"


def is_beyond_the_end(exc: BaseException) -> bool:
    """Whether a range was refused because the object is empty: it has no first byte."""
    return code_of(exc) == "InvalidRange" or status_of(exc) == 416


def whole_bytes(answer: Mapping[str, Any]) -> int:
    """Size of the whole object, from the answer to a GET of a part of it; some stores send all of it instead."""
    total = str(answer.get("ContentRange", "")).rpartition("/")[2]
    return int(total) if total.isdecimal() else int(answer["ContentLength"])


def was_asked_before(exc: BaseException) -> bool:
    """Whether botocore had sent the same request before the one that was refused so: that one may have been done."""
    answers = [answer for one in chain(exc) if isinstance(answer := getattr(one, "response", None), dict)]
    return any(answer.get("ResponseMetadata", {}).get("RetryAttempts", 0) for answer in answers)


def check_list(answer: Mapping[str, Any]) -> None:
    """Refuse what is no list: taken for an empty one it would tell of no lease, no session and no epoch.

    Raises:
        NotAStore: It has none of a list's fields.
    """
    if not answer.keys() & _LIST_FIELDS:
        raise NotAStore("a list has none of its fields")


def check_answer(method: str, answer: Mapping[str, Any], marks: Marks) -> None:
    """Refuse what came in place of the answer to a GET, HEAD or PUT, which tells the object's ETag, or to a DELETE.

    Raises:
        NotAStore: It is a page for people, or has no header of the store's, of which others of its kind had one and
            which does not prove itself. Of a put or a deletion that was never done, or in place of a whole blob.
    """
    said = answer.get("ResponseMetadata", {})
    headers = said.get("HTTPHeaders", {})
    if is_page(said.get("HTTPStatusCode"), headers.get("content-type", ""), has_etag="ETag" in answer):
        raise NotAStore("a page came in place of the answer")
    if marks.are_missing(method, headers) and not _proves_itself(method, answer):
        raise NotAStore("an answer has none of the store's headers")


def note_result(
    response_dict: Mapping[str, Any], customized_response_dict: MutableMapping[str, object], **_: object
) -> None:
    """Answer botocore's ``before-parse`` of a batch: it parses nothing, and a batch without a failure, to the same."""
    customized_response_dict[_IS_RESULT] = b"DeleteResult" in response_dict["body"]


def _proves_itself(method: str, answer: Mapping[str, Any]) -> bool:
    """Whether nobody but a store says this, also one that sends no header of which others had one.

    Another implementation may take a store's place behind its name.
    """
    if method == "delete_objects":
        return bool(answer.get(_IS_RESULT))
    return method == "list_objects_v2" and bool(answer.keys() & _LIST_FIELDS)
