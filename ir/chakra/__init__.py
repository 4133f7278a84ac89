"""Chakra execution traces (`.et`); no other package imports protobuf."""

from onerank.ir.chakra.chakra_json import from_json, to_json
from onerank.ir.chakra.encode import NodeWriter, attribute, header
from onerank.ir.chakra.framing import EmptyFileError, MissingMetadataError, TruncatedError
from onerank.ir.chakra.rank_template import PEERS, RankDiff, Template
from onerank.ir.chakra.reader import Repairs, read, read_repaired
from onerank.ir.chakra.records import Attribute, ChakraRecords, Record, read_records, write_records
from onerank.ir.chakra.writer import write

__all__ = [
    "PEERS",
    "Attribute",
    "ChakraRecords",
    "EmptyFileError",
    "MissingMetadataError",
    "NodeWriter",
    "RankDiff",
    "Record",
    "Repairs",
    "Template",
    "TruncatedError",
    "attribute",
    "from_json",
    "header",
    "read",
    "read_records",
    "read_repaired",
    "to_json",
    "write",
    "write_records",
]
