"""The only canonical form: when two messages, tools or arguments are the same, and their digests (DESIGN §5)."""

from openforgerl.conversation.canonical import (
    canonical_json,
    digest_json,
    digest_message,
    digest_outline,
    digest_tools,
    parse_arguments,
    plain_call_id,
    same_message,
    same_tools,
)

__all__ = [
    "canonical_json",
    "digest_json",
    "digest_message",
    "digest_outline",
    "digest_tools",
    "parse_arguments",
    "plain_call_id",
    "same_message",
    "same_tools",
]
