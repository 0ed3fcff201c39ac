"""How a conversation opens: what stands before its first turn becomes one system message, in every dialect."""

from __future__ import annotations

from openforgerl.types import Message, Part, Role, Text

SYSTEM_JOIN = "\n\n"
"""What stands between leading system and developer messages, which become one."""


def joined_system(messages: list[Message]) -> list[Message]:
    """Leading system and developer messages as one; later ones stay where they are, for the template to judge."""
    leading = next((at for at, message in enumerate(messages) if message.role is not Role.SYSTEM), len(messages))
    if leading < 2:
        return messages
    parts: list[Part] = []
    for message in messages[:leading]:
        if parts and message.parts:
            parts.append(Text(SYSTEM_JOIN))
        parts += message.parts
    original = next((message.original_role for message in messages[:leading] if message.original_role), None)
    merged = Message(role=Role.SYSTEM, parts=tuple(parts), original_role=original, name=messages[0].name)
    return [merged, *messages[leading:]]
