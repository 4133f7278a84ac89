"""Chakra execution traces (`.et`): the only place that knows protobuf."""

from onerank.ir.chakra.json import from_json, to_json
from onerank.ir.chakra.reader import read
from onerank.ir.chakra.records import Attribute, Record, Records, read_records, write_records
from onerank.ir.chakra.wire import EmptyFileError, MissingMetadataError, TruncatedError
from onerank.ir.chakra.writer import write

__all__ = [
    "Attribute",
    "EmptyFileError",
    "MissingMetadataError",
    "Record",
    "Records",
    "TruncatedError",
    "from_json",
    "read",
    "read_records",
    "to_json",
    "write",
    "write_records",
]
