"""Small training steps for the ASTRA-sim export, and the attributes of their records."""

from typing import Any

from onerank.ir import (
    Collective,
    Graph,
    GraphBuilder,
    Job,
    Kind,
    ProcessGroup,
    Reason,
    World,
)
from onerank.ir.chakra import Record

TP4 = Job(world=World({"tp": 4}), groups=(ProcessGroup("tp", (0, 1, 2, 3), "tp"),))


TP2_DP2 = Job(
    world=World({"tp": 2, "dp": 2}),
    rank=1,
    groups=(
        ProcessGroup("tp", (0, 1), "tp"),
        ProcessGroup("dp", (1, 3), "dp"),
        ProcessGroup("all", (0, 1, 2, 3), "world"),
        ProcessGroup("alone", (1,)),
        ProcessGroup("odd", (1, 2)),
    ),
)


class Step(GraphBuilder):
    """A graph builder with one method per kind of node."""

    def host(self, *after: int) -> int:
        return self._after(after, self.add(name="aten::op", kind=Kind.HOST_OP, duration_ns=5000))

    def kernel(self, name: str, duration_ns: int, *after: int, **columns: Any) -> int:
        columns = {"kind": Kind.KERNEL, "stream": 7, **columns}
        return self._after(after, self.add(name=name, duration_ns=duration_ns, **columns))

    def collective(self, collective: Collective, size: int, group: str, *after: int) -> int:
        columns = {"kind": Kind.COLLECTIVE, "collective": collective, "comm_bytes": size}
        name = f"nccl:{collective.name.lower()}"
        return self._after(after, self.add(name=name, stream=20, group=group, **columns))

    def message(self, kind: Kind, peer: int, size: int, *after: int) -> int:
        end = "comm_dst" if kind is Kind.SEND else "comm_src"
        columns = {"kind": kind, end: peer, "comm_bytes": size, "comm_tag": 3, "stream": 21}
        return self._after(after, self.add(name=kind.name.lower(), **columns))

    def _after(self, after: tuple[int, ...], index: int) -> int:
        for source in after:
            self.edge(source, index, Reason.DATA)
        return index


def small_step(job: Job = TP4, group: str = "tp") -> Graph:
    """Return launch -> gemm -> all-reduce -> add, and a concurrent host operation."""
    step = Step()
    launch = step.host()
    gemm = step.kernel("gemm", 12_345, launch)
    reduce = step.collective(Collective.ALL_REDUCE, 4096, group, gemm)
    step.kernel("add", 333, reduce, step.host(launch))
    return step.build(job)


def one_collective(collective: Collective, size: int, group: str, job: Job = TP2_DP2) -> Graph:
    """Return a step with a single collective."""
    step = Step()
    step.collective(collective, size, group)
    return step.build(job)


def values(record: Record) -> dict[str, tuple[str, object]]:
    return {name: (field.variant, field.value) for name, field in record.attributes.items()}


def step_with_gaps(**job: Any) -> Graph:
    """Return kernels at 0-1000, 3000-4000 and 6000-7000 ns, and a collective at 4500-5000."""
    step = Step()
    newest: tuple[int, ...] = ()
    for number, start in enumerate((0, 3000, 6000)):
        newest = (step.kernel(f"gemm {number}", 1000, *newest, start_ns=start),)
        if number == 1:
            newest = (step.collective(Collective.ALL_REDUCE, 64, "tp", *newest),)
            step.update(newest[0], start_ns=4500, duration_ns=500)
    fields = {"world": TP4.world, "groups": TP4.groups, **job}
    return step.build(Job(**fields))
