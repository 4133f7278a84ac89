"""Chakra execution traces (`.et`): the only place that knows protobuf."""

from onerank.ir.chakra.json import from_json, to_json
from onerank.ir.chakra.likeness import PEERS, Likeness
from onerank.ir.chakra.nodewriter import NodeWriter, attribute, header
from onerank.ir.chakra.reader import read
from onerank.ir.chakra.records import Attribute, Record, Records, read_records, write_records
from onerank.ir.chakra.template import Template
from onerank.ir.chakra.wire import EmptyFileError, MissingMetadataError, TruncatedError
from onerank.ir.chakra.writer import write

__all__ = [
    "PEERS",
    "Attribute",
    "EmptyFileError",
    "Likeness",
    "MissingMetadataError",
    "NodeWriter",
    "Record",
    "Records",
    "Template",
    "TruncatedError",
    "attribute",
    "from_json",
    "header",
    "read",
    "read_records",
    "to_json",
    "write",
    "write_records",
]
