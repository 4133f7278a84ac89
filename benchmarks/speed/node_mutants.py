"""Mutants of the traces of a workload: attributes, dependencies and arrivals of their nodes."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.speed.mutant_edits import REMOVED, Edit, Mutant, label_of
from onerank.ir.chakra.et_def_pb2 import AttributeProto, GlobalMetadata, Node
from onerank.ir.chakra.framing import ChakraFile, frame

RANKS = 4
COMP, SEND, RECV, COLL = 4, 5, 6, 7


def node_mutants() -> Iterator[Mutant]:
    """Yield mutants of single nodes, of their order, and random ones."""
    yield from _nodes()
    yield from _dependencies()
    yield from _arrivals()
    yield from _random_fields(300)


Change = Callable[[list[Node], int], None]
"""Changes the nodes of a rank in place."""


def _nodes_of(path: Path) -> list[Node]:
    with ChakraFile(path) as file:
        return [Node.FromString(message) for message in file.nodes()]


def _write(path: Path, nodes: list[Node]) -> None:
    header = GlobalMetadata(version="1.0.0").SerializeToString()
    path.write_bytes(frame([header, *(node.SerializeToString() for node in nodes)]))


def _edited(
    change: Change,
    *,
    ranks: tuple[int, ...] = (1,),
    sets: tuple[str, ...] = ("workload", "workload_roofline"),
) -> Edit:
    def edit(folder: Path) -> None:
        for name in sets:
            for rank in ranks:
                path = folder / f"{name}.{rank}.et"
                nodes = _nodes_of(path)
                change(nodes, rank)
                _write(path, nodes)

    return edit


def attribute(node: Node, name: str) -> AttributeProto | None:
    """Return an attribute of a node."""
    return next((entry for entry in node.attr if entry.name == name), None)


def _set(name: str, variant: str, value: object) -> Callable[[Node], None]:
    """Return an edit that sets an attribute of a node, or removes it."""

    def edit(node: Node) -> None:
        remaining = [
            AttributeProto.FromString(a.SerializeToString()) for a in node.attr if a.name != name
        ]
        del node.attr[:]
        node.attr.extend(remaining)
        if value is REMOVED:
            return
        added = node.attr.add(name=name)
        if variant == "bool_list":
            added.bool_list.values.extend(value)
        else:
            setattr(added, variant, value)

    return edit


def _at(kind: int, edit: Callable[[Node], None], place: int = 2) -> Change:
    """Return a change of the node of a kind at a place among those of its kind."""

    def change(nodes: list[Node], _: int) -> None:
        of_kind = [node for node in nodes if node.type == kind]
        edit(of_kind[min(place, len(of_kind) - 1)])

    return change


ALL = tuple(range(RANKS))


def _nodes() -> Iterator[Mutant]:
    for label, kind, name, variant, value, legitimate in _ATTRIBUTES:
        for ranks in ((1,), ALL):
            where = "all ranks" if len(ranks) > 1 else "rank 1"
            for place in (0, 2):
                edit = _edited(_at(kind, _set(name, variant, value), place), ranks=ranks)
                sound = legitimate is True or (legitimate == "all" and ranks == ALL)
                yield Mutant(
                    f"{label} {place} {name} {variant} {label_of(value)}, {where}", edit, sound
                )
    for value in (0, 1, 7, 2**31, 2**40, 2**62, 2**64 - 5):
        for place in (0, 2):

            def lasts(node: Node, value: int = value) -> None:
                node.duration_micros = value

            yield Mutant(
                f"compute {place} duration_micros {value}",
                _edited(_at(COMP, lasts, place)),
                legitimate=False,
            )

            def lasts_without(node: Node, value: int = value) -> None:
                node.duration_micros = value
                _set("duration_ns", "", REMOVED)(node)

            yield Mutant(
                f"compute {place} duration_micros {value} without duration_ns",
                _edited(_at(COMP, lasts_without, place), sets=("workload",)),
                legitimate=value <= 2**31,
            )
    for kind, label in ((COMP, "compute"), (SEND, "send"), (RECV, "receive"), (COLL, "collective")):
        for number in (0, 1, 2, 3, 4, 5, 6, 7, 8, 99):
            if number == kind:
                continue

            def becomes(node: Node, number: int = number) -> None:
                node.type = number

            for ranks in ((1,), ALL):
                where = "all ranks" if len(ranks) > 1 else "rank 1"
                edit = _edited(_at(kind, becomes), ranks=ranks)
                yield Mutant(f"{label} becomes type {number}, {where}", edit, legitimate=False)

        def removed(nodes: list[Node], _: int, kind: int = kind) -> None:
            of_kind = [node for node in nodes if node.type == kind]
            victim = of_kind[min(2, len(of_kind) - 1)]
            for node in nodes:
                kept = [dep for dep in node.data_deps if dep != victim.id]
                if len(kept) < len(node.data_deps):
                    del node.data_deps[:]
                    node.data_deps.extend(dict.fromkeys([*kept, *victim.data_deps]))
            nodes.remove(victim)

        sound = kind == COMP
        yield Mutant(f"{label} removed, rank 1", _edited(removed), sound)
        yield Mutant(
            f"{label} removed, all ranks", _edited(removed, ranks=ALL), sound or kind == COLL
        )

        def repeated(nodes: list[Node], _: int, kind: int = kind) -> None:
            of_kind = [node for node in nodes if node.type == kind]
            copy = Node.FromString(of_kind[min(2, len(of_kind) - 1)].SerializeToString())
            copy.data_deps.append(copy.id)
            copy.id = max(node.id for node in nodes) + 1
            nodes.append(copy)

        yield Mutant(f"{label} repeated, rank 1", _edited(repeated), sound)
        yield Mutant(
            f"{label} repeated, all ranks", _edited(repeated, ranks=ALL), sound or kind == COLL
        )

    def renamed(node: Node) -> None:
        node.name = "\u00e9 [b] \x1b[31m" * 5

    yield Mutant("compute renamed", _edited(_at(COMP, renamed)), legitimate=True)

    def nameless(node: Node) -> None:
        node.ClearField("name")

    yield Mutant("collective without name", _edited(_at(COLL, nameless)), legitimate=True)

    def started(node: Node) -> None:
        node.start_time_micros = 2**60

    yield Mutant("start_time_micros 2**60", _edited(_at(COMP, started)), legitimate=True)
    for label, write in _WHOLE_FILES.items():

        def edit(folder: Path, write: Callable[[list[Node]], list[bytes]] = write) -> None:
            for name in ("workload", "workload_roofline"):
                path = folder / f"{name}.1.et"
                path.write_bytes(frame(write(_nodes_of(path))))

        yield Mutant(f"file of rank 1: {label}", edit, legitimate=not label.startswith("bad"))


_HEADER = GlobalMetadata(version="1.0.0").SerializeToString()

_WHOLE_FILES: dict[str, Callable[[list[Node]], list[bytes]]] = {
    "shuffled": lambda nodes: [
        _HEADER,
        *(n.SerializeToString() for n in random.Random(0).sample(nodes, len(nodes))),
    ],
    "reversed": lambda nodes: [_HEADER, *(n.SerializeToString() for n in reversed(nodes))],
    "metadata of another version": lambda nodes: [
        GlobalMetadata(version="9.9").SerializeToString(),
        *(n.SerializeToString() for n in nodes),
    ],
    "empty metadata": lambda nodes: [b"", *(n.SerializeToString() for n in nodes)],
    "bad: no metadata": lambda nodes: [n.SerializeToString() for n in nodes],
    "bad: only metadata": lambda _: [_HEADER],
    "bad: metadata twice": lambda nodes: [
        _HEADER,
        _HEADER,
        *(n.SerializeToString() for n in nodes),
    ],
    "without the last node": lambda nodes: [
        _HEADER,
        *(n.SerializeToString() for n in nodes[:-1] if n.type != COMP or n is not nodes[-1]),
    ],
    "bad: first node twice": lambda nodes: [
        _HEADER,
        nodes[0].SerializeToString(),
        *(n.SerializeToString() for n in nodes),
    ],
    "bad: empty message inside": lambda nodes: [
        _HEADER,
        *(n.SerializeToString() for n in nodes[:3]),
        b"",
        *(n.SerializeToString() for n in nodes[3:]),
    ],
    "bad: broken message inside": lambda nodes: [
        _HEADER,
        *(n.SerializeToString() for n in nodes[:3]),
        b"\xff\xff\xff",
        *(n.SerializeToString() for n in nodes[3:]),
    ],
}

_I32, _I64, _U64 = "int32_val", "int64_val", "uint64_val"

_ATTRIBUTES: list[tuple[str, int, str, str, Any, bool | str]] = [
    *(
        ("compute", COMP, "num_ops", _I64, value, False)
        for value in (REMOVED, 0, -1, 1, 500, 2**62)
    ),
    ("compute", COMP, "num_ops", _U64, 2**63 + 5, False),
    ("compute", COMP, "num_ops", "string_val", "5500", False),
    ("compute", COMP, "num_ops", "float_val", 5500.0, False),
    *(("compute", COMP, "tensor_size", _U64, value, False) for value in (REMOVED, 0, 2**40, 2**63)),
    ("compute", COMP, "tensor_size", _I64, -1, False),
    ("compute", COMP, "is_cpu_op", "bool_val", False, True),
    ("compute", COMP, "is_cpu_op", "bool_val", REMOVED, True),
    ("compute", COMP, "is_cpu_op", "bool_val", True, False),
    ("compute", COMP, "is_cpu_op", _I32, 0, True),
    ("compute", COMP, "is_cpu_op", "string_val", "no", False),
    *(("compute", COMP, "duration_ns", _I64, value, False) for value in (0, 1, 10**12)),
    ("compute", COMP, "duration_ns", _I64, REMOVED, True),
    ("compute", COMP, "mine", "string_val", "note", True),
    *(
        ("collective", COLL, "comm_size", _I64, value, False)
        for value in (REMOVED, 0, -1, 2**46, 2**62)
    ),
    *(("collective", COLL, "comm_size", _I64, value, "all") for value in (4096, 2**20)),
    ("collective", COLL, "comm_size", "string_val", "4096", False),
    ("collective", COLL, "comm_size", "double_val", 4096.0, False),
    ("collective", COLL, "comm_size", _U64, 2**20, "all"),
    *(("collective", COLL, "comm_type", _I64, value, "all") for value in (0, 2, 6, 7)),
    *(
        ("collective", COLL, "comm_type", _I64, value, False)
        for value in (1, 3, 4, 5, 8, 9, 10, 99, -1, REMOVED)
    ),
    ("collective", COLL, "comm_type", "string_val", "ALL_REDUCE", False),
    *(
        ("collective", COLL, "pg_name", "string_val", value, False)
        for value in ("", "0", "99", "tp", "-1", "2.5", "99999999999")
    ),
    ("collective", COLL, "pg_name", "string_val", "1", "all"),
    ("collective", COLL, "pg_name", "string_val", "01", "all"),
    ("collective", COLL, "pg_name", "string_val", "1e3", "all"),  # std::stoi reads 1
    ("collective", COLL, "pg_name", "string_val", " 1", "all"),
    ("collective", COLL, "pg_name", "string_val", REMOVED, False),
    ("collective", COLL, "pg_name", _I32, 1, False),
    ("collective", COLL, "comm_priority", _I32, 0, True),
    ("collective", COLL, "comm_priority", _I32, 5, True),
    ("collective", COLL, "comm_priority", "string_val", "high", False),
    ("collective", COLL, "involved_dim", "bool_list", [True], True),
    ("collective", COLL, "involved_dim", "bool_list", [False], False),
    ("collective", COLL, "involved_dim", "bool_list", [], False),
    ("collective", COLL, "involved_dim", "bool_val", True, False),
    ("collective", COLL, "is_cpu_op", "bool_val", True, False),
    ("collective", COLL, "duration_ns", _I64, 10**15, True),
    *(
        ("send", SEND, "comm_dst", _I32, value, False)
        for value in (REMOVED, -1, 1, 4, 99, 2**31 - 1)
    ),
    *(("send", SEND, "comm_src", _I32, value, False) for value in (-1, 2, 99)),
    ("send", SEND, "comm_src", _I32, REMOVED, True),
    *(("send", SEND, "comm_tag", _I32, value, False) for value in (REMOVED, -1, 77)),
    *(("send", SEND, "comm_size", _I64, value, False) for value in (REMOVED, 0, -1, 4097, 2**62)),
    ("send", SEND, "comm_dst", _I64, 2, False),
    ("send", SEND, "comm_dst", "string_val", "2", False),
    *(("receive", RECV, "comm_src", _I32, value, False) for value in (REMOVED, -1, 1, 4, 99)),
    *(("receive", RECV, "comm_dst", _I32, value, False) for value in (-1, 2, 99)),
    ("receive", RECV, "comm_dst", _I32, REMOVED, True),
    *(("receive", RECV, "comm_tag", _I32, value, False) for value in (REMOVED, -1, 77)),
    *(("receive", RECV, "comm_size", _I64, value, False) for value in (REMOVED, 0, -1, 4097)),
    ("receive", RECV, "comm_tag", "string_val", "3", False),
]
"""Kind of node, attribute, type, value, and whether the change is sound (on "all" ranks only)."""


def _dependencies() -> Iterator[Mutant]:
    for place in (0, 3, 9, 17):
        for label, change, legitimate in (
            ("dangling", lambda node, nodes: node.data_deps.append(10**6), False),
            ("dangling control", lambda node, nodes: node.ctrl_deps.append(10**6), False),
            ("on itself", lambda node, nodes: node.data_deps.append(node.id), False),
            ("control on itself", lambda node, nodes: node.ctrl_deps.append(node.id), False),
            ("on the last node", lambda node, nodes: node.data_deps.append(nodes[-1].id), False),
            ("twice", lambda node, nodes: node.data_deps.extend([*node.data_deps]), True),
            ("as control too", lambda node, nodes: node.ctrl_deps.extend([*node.data_deps]), True),
            ("moved to control", _move_to_control, True),
        ):
            for ranks in ((1,), ALL):

                def each(
                    nodes: list[Node], _: int, change: Any = change, place: int = place
                ) -> None:
                    change(nodes[min(place, len(nodes) - 2)], nodes)

                where = "all ranks" if len(ranks) > 1 else "rank 1"
                name = f"dependency of node {place} {label}, {where}"
                yield Mutant(name, _edited(each, ranks=ranks), legitimate)

    def backwards(nodes: list[Node], _: int) -> None:
        number = {node.id: 10**5 - node.id for node in nodes}
        for node in nodes:
            deps = [number[dep] for dep in node.data_deps]
            del node.data_deps[:]
            node.data_deps.extend(deps)
            node.id = number[node.id]

    yield Mutant("ids in opposite order, rank 1", _edited(backwards), legitimate=True)
    yield Mutant("ids in opposite order, all ranks", _edited(backwards, ranks=ALL), legitimate=True)

    def large(nodes: list[Node], _: int) -> None:
        for node in nodes:
            deps = [dep + 2**63 for dep in node.data_deps]
            del node.data_deps[:]
            node.data_deps.extend(deps)
            node.id += 2**63

    yield Mutant("ids from 2**63 on", _edited(large), legitimate=True)

    def unchained(nodes: list[Node], _: int) -> None:
        """Remove the order of two collectives of one group."""
        kinds = {node.id: node.type for node in nodes}
        for node in nodes:
            kept = [
                d for d in node.data_deps if not (node.type == COLL and kinds[d] in (COLL, SEND))
            ]
            del node.data_deps[:]
            node.data_deps.extend(kept)

    yield Mutant("communication unchained, rank 1", _edited(unchained), legitimate=False)
    yield Mutant(
        "communication unchained, all ranks", _edited(unchained, ranks=ALL), legitimate=False
    )

    def free(nodes: list[Node], _: int) -> None:
        for node in nodes:
            del node.data_deps[:]

    yield Mutant("no dependencies, rank 1", _edited(free), legitimate=False)
    yield Mutant("no dependencies, all ranks", _edited(free, ranks=ALL), legitimate=False)


def _move_to_control(node: Node, _: list[Node]) -> None:
    node.ctrl_deps.extend(node.data_deps)
    del node.data_deps[:]


_SHARED_GROUPS: dict[str, tuple[dict[str, list[int]], str, str, bool]] = {
    "one group": ({"1": [0, 1]}, "1", "1", False),
    "two groups of the same ranks": ({"1": [0, 1], "2": [0, 1]}, "1", "2", False),
    "two groups that share two ranks": ({"1": [0, 1, 3], "2": [0, 1]}, "1", "2", False),
    "two groups that share one rank": ({"1": [0, 1], "2": [0, 3]}, "1", "2", True),
}
"""Name -> groups, the groups of collectives A and B, whether their order is free."""


def _arrivals() -> Iterator[Mutant]:
    """Replace the workload by one in which late messages decide the order of two collectives.

    Rank 0 may issue A at once, and B after a message that rank 2 sends 100 us later. Rank 1 may
    issue B at once, and A after such a message.
    """
    for label, (groups, first, second, free) in _SHARED_GROUPS.items():
        for ordered in (False, True):

            def edit(
                folder: Path,
                groups: dict[str, list[int]] = groups,
                ends: tuple[str, str] = (first, second),
                ordered: bool = ordered,
            ) -> None:
                (folder / "comm_groups.json").write_text(json.dumps(groups))
                for rank in range(RANKS):
                    calls = {
                        name: group
                        for name, group in zip("AB", ends, strict=True)
                        if rank in groups[group]
                    }
                    for name in ("workload", "workload_roofline"):
                        nodes = _late_step(rank, calls, ordered=ordered)
                        _write(folder / f"{name}.{rank}.et", nodes)

            order = "with an order" if ordered else "without an order"
            yield Mutant(f"late messages, {label}, {order}", edit, legitimate=ordered or free)


def _late_step(rank: int, calls: dict[str, str], *, ordered: bool) -> list[Node]:
    """Return the step of a rank with the collectives `calls`, name -> group."""
    nodes = [_node(1, COMP, 5_000)]
    if rank == 2:
        nodes.append(_node(2, COMP, 100_000, after=1))
        for target in (0, 1):
            message = {"comm_dst": target, "comm_tag": target}
            nodes.append(_node(3 + target, SEND, after=2 + target, comm_size=64, **message))
        return nodes
    late = {0: "B", 1: "A"}.get(rank, "")
    if rank in (0, 1):
        nodes.append(_node(2, RECV, comm_size=64, comm_src=2, comm_tag=rank))
    for number, (name, size) in enumerate((("A", 4096), ("B", 8192)), start=10):
        if name in calls:
            node = _node(number, COLL, after=2 if name == late else 1, comm_type=0, comm_size=size)
            _set("pg_name", "string_val", calls[name])(node)
            if ordered and name == "B" and "A" in calls:
                node.data_deps.append(10)
            nodes.append(node)
    return nodes


def _node(number: int, kind: int, duration_ns: int = 0, *, after: int = 0, **values: int) -> Node:
    node = Node(id=number, name=f"node {number}", duration_micros=duration_ns // 1000)
    node.type = kind
    if after:
        node.data_deps.append(after)
    if kind == COMP:
        values |= {"num_ops": duration_ns * 1000 + 500, "duration_ns": duration_ns}
        _set("tensor_size", _U64, 1)(node)
    for name, value in values.items():
        small = name in ("comm_dst", "comm_src", "comm_tag")
        _set(name, _I32 if small else _I64, value)(node)
    return node


def _random_fields(count: int) -> Iterator[Mutant]:
    """Change one random attribute of one random node on one rank or all, from a fixed seed."""
    draw = random.Random(20261125)
    for number in range(count):
        seed = draw.randrange(2**32)

        def change(nodes: list[Node], rank: int, seed: int = seed) -> None:
            rng = random.Random(seed)
            node = rng.choice(nodes)
            action = rng.choice(("attribute", "attribute", "dependency", "swap", "drop"))
            if action == "attribute" and node.attr:
                field = rng.choice(list(node.attr))
                variant = field.WhichOneof("value")
                before = getattr(field, variant) if variant else None
                if isinstance(before, bool) or before is None:
                    field.bool_val = not before
                elif isinstance(before, int):
                    bits = 31 if variant == _I32 else 63
                    after = rng.choice(
                        (0, 1, before + 1, before * 2, before * 1000, 2 ** (bits - 1))
                    )
                    setattr(field, str(variant), min(after, 2**bits - 1))
                elif isinstance(before, str):
                    field.string_val = rng.choice(("", "0", "1", "2", "9", "x"))
            elif action == "dependency" and node.data_deps:
                node.data_deps[rng.randrange(len(node.data_deps))] = rng.choice(nodes).id
            elif action == "swap":
                other = rng.choice(nodes)
                node.type, other.type = other.type, node.type
                kept = [AttributeProto.FromString(a.SerializeToString()) for a in node.attr]
                del node.attr[:]
                node.attr.extend(other.attr)
                del other.attr[:]
                other.attr.extend(kept)
            else:
                nodes.remove(node)

        ranks = (draw.randrange(RANKS),) if draw.random() < 0.7 else ALL
        where = "all ranks" if len(ranks) > 1 else f"rank {ranks[0]}"
        yield Mutant(f"random {number}, {where}", _edited(change, ranks=ranks), legitimate=None)
