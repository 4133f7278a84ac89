"""Chakra files for any content: nothing is lost, neither from a file nor from a graph."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from onerank.ir import (
    Collective,
    Edges,
    Evidence,
    Graph,
    Job,
    Kind,
    Nodes,
    Phase,
    ProcessGroup,
    Reason,
    StringTable,
    World,
    chakra,
)
from onerank.ir.chakra.attributes import FIELDS, whole_micros
from onerank.ir.chakra.et_def_pb2 import AttributeProto, GlobalMetadata, IOInfo, Node
from onerank.ir.chakra.framing import ChakraFile, frame
from onerank.ir.chakra.metadata import SCHEMA
from onerank.ir.nodes import TEXT_COLUMNS, default_of, dtype_of

Draw = Any

# Values, with those at the edges often

INT32 = st.one_of(st.integers(-2, 2), st.integers(-(2**31), 2**31 - 1))
INT64 = st.one_of(st.integers(-2, 2), st.integers(-(2**63), 2**63 - 1))
UINT32 = st.one_of(st.integers(0, 2), st.integers(0, 2**32 - 1))
UINT64 = st.one_of(st.integers(0, 2), st.integers(0, 2**64 - 1))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NAMES = [
    *("is_cpu_op", "gpu_op", "data_dep_reasons", "schema", "world", "rank", "rf_id"),
    *(field.attribute for field in FIELDS),
]
WORDS = [
    "memcpy",
    "memset",
    "measured",
    "forward",
    "none",
    "FORWARD",
    "",
    SCHEMA,
    "3",
    '{"sizes":{}}',
]

SCALARS = {
    "double": st.floats(),
    "float": st.floats(width=32),
    "int32": INT32,
    "int64": INT64,
    "uint32": UINT32,
    "uint64": UINT64,
    "sint32": INT32,
    "sint64": INT64,
    "fixed32": UINT32,
    "fixed64": UINT64,
    "sfixed32": INT32,
    "sfixed64": INT64,
    "bool": st.booleans(),
    "string": st.one_of(st.sampled_from(WORDS), TEXT),
    "bytes": st.one_of(st.binary(max_size=4), st.lists(st.integers(0, 5), max_size=3).map(bytes)),
}
UNKNOWN_FIELD = st.sampled_from([b"", b"", b"\xa2\x06\x01x", b"\xa0\x06\x07\xad\x06abcd"])
"""Nothing, or fields 100 and 101 of a Chakra to come."""


@st.composite
def attributes(draw: Draw) -> AttributeProto:
    attribute = AttributeProto(
        name=draw(st.one_of(st.sampled_from(NAMES), TEXT)),
        doc_string=draw(st.sampled_from(["", "", "why"])),
    )
    kind = draw(st.sampled_from([*SCALARS, None]))
    if kind is not None and draw(st.booleans()):
        setattr(attribute, f"{kind}_val", draw(SCALARS[kind]))
    elif kind is not None:
        values = getattr(attribute, f"{kind}_list")
        values.SetInParent()
        values.values.extend(draw(st.lists(SCALARS[kind], max_size=3)))
    attribute.MergeFromString(draw(UNKNOWN_FIELD))
    return attribute


def typical_attributes() -> st.SearchStrategy[AttributeProto]:
    """Attributes that are read into columns, in the type we write, values of every size."""
    pairs = [(field.attribute, field.variant) for field in FIELDS]
    pairs += [
        ("is_cpu_op", "bool_val"),
        ("gpu_op", "string_val"),
        ("data_dep_reasons", "bytes_val"),
    ]

    def of(pair: tuple[str, str]) -> st.SearchStrategy[AttributeProto]:
        name, variant = pair
        values = SCALARS[variant.removesuffix("_val")]

        def attribute(value: Any) -> AttributeProto:
            proto = AttributeProto(name=name)
            setattr(proto, variant, value)
            return proto

        return values.map(attribute)

    return st.sampled_from(pairs).flatmap(of)


OPERANDS = st.one_of(st.none(), st.builds(IOInfo, values=TEXT, shapes=TEXT, types=TEXT))


@st.composite
def foreign_nodes(draw: Draw) -> list[Node]:
    ids = draw(st.lists(UINT64, unique=True, max_size=5))
    nodes: list[Node] = []
    for number in ids:
        deps = st.lists(st.sampled_from(ids), max_size=3)
        node = Node(
            id=number,
            name=draw(TEXT),
            ctrl_deps=draw(deps),
            data_deps=draw(deps),
            start_time_micros=draw(UINT64),
            duration_micros=draw(UINT64),
            inputs=draw(OPERANDS),
            outputs=draw(OPERANDS),
            attr=draw(st.lists(st.one_of(attributes(), typical_attributes()), max_size=6)),
        )
        node.type = draw(st.sampled_from([*range(8), 8, 99, -1]))
        node.MergeFromString(draw(UNKNOWN_FIELD))
        nodes.append(node)
    return nodes


def not_ours(metadata: GlobalMetadata) -> bool:
    """Whether reading it must not fail: in our own files the job has to decode."""
    schemas = [a.string_val for a in metadata.attr if a.name == "schema"]
    return not schemas or not schemas[-1].startswith("onerank ")


@st.composite
def foreign_metadata(draw: Draw) -> GlobalMetadata:
    metadata = GlobalMetadata(version=draw(TEXT), attr=draw(st.lists(attributes(), max_size=3)))
    metadata.MergeFromString(draw(UNKNOWN_FIELD))
    return metadata


OWN = GlobalMetadata(attr=[AttributeProto(name="schema", string_val=SCHEMA)])


def through_files(metadata: GlobalMetadata, nodes: list[Node], work: Any) -> None:
    """Write the messages, and call `work` with the path and the path of a file to write."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.et"
        path.write_bytes(frame([m.SerializeToString() for m in (metadata, *nodes)]))
        work(path, Path(folder) / "out.et")


METADATA = st.one_of(foreign_metadata().filter(not_ours), st.just(OWN))


@given(METADATA, foreign_nodes())
@settings(max_examples=100, deadline=None)
def test_any_file_is_written_back_message_for_message(metadata: GlobalMetadata, nodes: list[Node]):
    def work(path: Path, out: Path) -> None:
        chakra.write(chakra.read(path), out)
        # As bytes, which unlike == tells one NaN from another, and finds it equal to itself.
        with ChakraFile(out) as back:
            assert back.metadata == metadata.SerializeToString()
            assert [*back.nodes()] == [node.SerializeToString() for node in nodes]
        records = chakra.read_records(path)
        assert [record.id for record in records.nodes] == [node.id for node in nodes]
        assert [len(record.attributes) for record in records.nodes] == [
            len({given.name for given in node.attr}) for node in nodes
        ]

    through_files(metadata, nodes, work)


# Graphs


COUNT = st.one_of(st.integers(0, 3), st.integers(0, 2**63 - 1))
NANOSECONDS = st.one_of(st.integers(0, 3000), st.integers(0, 2**63 - 1))
ENUMS = {"kind": Kind, "phase": Phase, "evidence": Evidence, "collective": Collective}


def values_of(spec: "dataclasses.Field[Any]") -> st.SearchStrategy[Any]:
    if spec.name in ENUMS:
        return st.sampled_from([int(member) for member in ENUMS[spec.name]])
    if spec.name in ("start_ns", "duration_ns"):
        return NANOSECONDS
    if spec.name in ("stream", "thread"):
        return st.integers(-1, 1)
    return st.one_of(st.just(default_of(spec)), INT32 if dtype_of(spec) is np.int32 else INT64)


@st.composite
def graphs(draw: Draw) -> Graph:
    ids = draw(st.lists(UINT64, unique=True, max_size=6))
    count = len(ids)
    strings = StringTable()
    columns: dict[str, Any] = {"id": np.array(ids, dtype=np.uint64)}
    for spec in dataclasses.fields(Nodes):
        if spec.name in TEXT_COLUMNS:
            texts = draw(st.lists(TEXT, min_size=count, max_size=count))
            columns[spec.name] = strings.encode(texts)
        elif spec.name not in ("id", "foreign"):
            values = draw(st.lists(values_of(spec), min_size=count, max_size=count))
            columns[spec.name] = np.array(values, dtype=dtype_of(spec))
    edge = st.tuples(
        st.integers(0, count - 1),
        st.integers(0, count - 1),
        st.sampled_from([int(r) for r in Reason]),
    )
    edges: list[tuple[int, int, int]] = draw(st.lists(edge, max_size=8)) if count else []
    table = np.array(edges, dtype=np.int64).reshape(-1, 3)
    job = Job(
        world=World(draw(st.dictionaries(TEXT, INT64, max_size=2))),
        rank=draw(UINT32),
        groups=tuple(draw(st.lists(st.builds(ProcessGroup, TEXT, st.just((0, 2))), max_size=2))),
    )
    return Graph(
        Nodes.of(count, **columns),
        Edges.from_pairs(count, table[:, 0], table[:, 1], table[:, 2].astype(np.uint8)),
        strings,
        job,
    )


def control_first(edges: Edges) -> list[list[tuple[int, Reason]]]:
    """Edges of each node, its CONTROL ones first: the file keeps them in a list of their own."""
    rows = [edges.of(node) for node in range(len(edges.offsets) - 1)]
    return [sorted(row, key=lambda edge: edge[1] is not Reason.CONTROL) for row in rows]


def assert_same(first: Graph, second: Graph) -> None:
    for spec in dataclasses.fields(Nodes):
        if spec.name in TEXT_COLUMNS:
            assert first.text(spec.name) == second.text(spec.name), spec.name
        elif spec.name != "foreign":
            pair = [getattr(graph.nodes, spec.name) for graph in (first, second)]
            assert pair[0].dtype == pair[1].dtype
            assert pair[0].tolist() == pair[1].tolist(), spec.name
    assert control_first(first.edges) == control_first(second.edges)
    assert first.job == second.job


@given(graphs())
@settings(max_examples=80, deadline=None)
def test_any_graph_is_read_back_column_for_column(graph: Graph):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.et"
        chakra.write(graph, path)
        back = chakra.read(path)
        assert_same(graph, back)
        assert back.foreign is None
        assert [node for node in back.nodes.foreign.tolist() if node is not None] == []
        first = path.read_bytes()
        chakra.write(back, path)
        assert path.read_bytes() == first


@given(METADATA, foreign_nodes(), st.data())
@settings(max_examples=80, deadline=None)
def test_changed_columns_of_another_tools_nodes_are_read_back(
    metadata: GlobalMetadata, nodes: list[Node], data: Draw
):
    def work(path: Path, out: Path) -> None:
        graph = chakra.read(path)
        columns: dict[str, Any] = {}
        for spec in data.draw(
            st.lists(
                st.sampled_from([s for s in dataclasses.fields(Nodes) if s.name != "foreign"]),
                unique_by=lambda spec: spec.name,
                max_size=4,
            )
        ):
            values = UINT64 if spec.name == "id" else values_of(spec)
            drawn = data.draw(
                st.lists(
                    TEXT if spec.name in TEXT_COLUMNS else values,
                    min_size=len(graph),
                    max_size=len(graph),
                    unique=spec.name == "id",
                )
            )
            is_text = spec.name in TEXT_COLUMNS
            columns[spec.name] = drawn if is_text else np.array(drawn, dtype=dtype_of(spec))
        changed = graph.with_columns(**columns)
        if data.draw(st.booleans()):
            edges = changed.edges
            changed = dataclasses.replace(
                changed,
                edges=dataclasses.replace(edges, reason=np.minimum(edges.reason, Reason.SYNC)),
            )
        chakra.write(changed, out)
        assert_same(changed, chakra.read(out))
        foreign = [[a for a in node.attr if a.name not in NAMES] for node in nodes]
        with ChakraFile(out) as file:
            written = [*file.nodes()]
        for message, expected in zip(written, foreign, strict=True):
            actual = [a for a in Node.FromString(message).attr if a.name not in NAMES]
            assert [a.SerializeToString() for a in actual] == [
                a.SerializeToString() for a in expected
            ]

    through_files(metadata, nodes, work)


# Time


LANES = st.lists(
    st.tuples(st.integers(-1, 1), st.integers(-1, 1), st.integers(0, 5000)), max_size=40
)


@given(LANES)
def test_no_lane_drifts_by_a_microsecond(rows: list[tuple[int, int, int]]):
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    nodes = Nodes.of(len(rows), stream=table[:, 0], thread=table[:, 1], duration_ns=table[:, 2])
    sums: dict[tuple[int, int], tuple[int, int]] = {}
    for (stream, thread, exact), micros in zip(rows, whole_micros(nodes).tolist(), strict=True):
        assert micros >= 0
        assert abs(micros * 1000 - exact) < 1000
        total = sums.get((stream, thread), (0, 0))
        sums[stream, thread] = (total[0] + exact, total[1] + micros)
        assert abs(sums[stream, thread][1] * 1000 - sums[stream, thread][0]) <= 500
