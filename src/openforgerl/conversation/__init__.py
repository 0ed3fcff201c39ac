"""The only canonical form: when two messages, tools or arguments are the same, and their digests (DESIGN §5)."""

from openforgerl.conversation.beginnings import Beginnings
from openforgerl.conversation.canonical import (
    MOST_NESTED,
    canonical_json,
    digest_json,
    digest_message,
    digest_outline,
    digest_tools,
    nested_too_deeply,
    parse_arguments,
    plain_call_id,
    same_message,
    same_tools,
)

__all__ = [
    "MOST_NESTED",
    "Beginnings",
    "canonical_json",
    "digest_json",
    "digest_message",
    "digest_outline",
    "digest_tools",
    "nested_too_deeply",
    "parse_arguments",
    "plain_call_id",
    "same_message",
    "same_tools",
]
