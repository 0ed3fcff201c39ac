"""What is recorded, in other tools' formats, and their conversations as samples. Exports say what they lose."""

from openforgerl.formats.importing import Imported, samples_of
from openforgerl.formats.opening import format_names, open_writer
from openforgerl.formats.reading import read_conversations
from openforgerl.formats.records import AttemptRecord, Decode, Report, Writer
from openforgerl.formats.selection import Selection

__all__ = [
    "AttemptRecord",
    "Decode",
    "Imported",
    "Report",
    "Selection",
    "Writer",
    "format_names",
    "open_writer",
    "read_conversations",
    "samples_of",
]
