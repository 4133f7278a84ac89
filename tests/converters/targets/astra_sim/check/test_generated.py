"""Generated workloads: a sound one passes, and an inserted fault is a finding."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

from generated_case import GROUPS, RANKS, Line, program
from hypothesis import given, settings
from hypothesis import strategies as st

from onerank.converters.targets.astra_sim.check import Finding, check

NETWORK = "topology: [ Switch ]\nnpus_count: [ 4 ]\nbandwidth: [ 50 ]\nlatency: [ 1 ]\n"


def findings(make: SimpleNamespace, ranks: list[list[Line]]) -> list[Finding]:
    files: dict[str, object] = {"comm_groups.json": GROUPS, "network.yml": NETWORK}
    for rank, lines in enumerate(ranks):
        shuffled = random.Random(rank).sample(lines, len(lines))
        files[f"w.{rank}.et"] = "\n".join(
            f"{number} {text}" + (f" after={','.join(map(str, after))}" if after else "")
            for number, text, after in shuffled
        )
    with TemporaryDirectory() as folder:
        make.write(Path(folder), files)
        return check(folder)


seeds = st.integers(0, 2**32)
steps = st.integers(1, 40)
generated = settings(max_examples=60, deadline=None)


@generated
@given(seed=seeds, count=steps)
def test_a_sound_program_passes(make: SimpleNamespace, seed: int, count: int) -> None:
    assert findings(make, program(seed, count)) == []


@generated
@given(seed=seeds, count=steps, data=st.data())
def test_a_back_edge_is_a_cycle(
    make: SimpleNamespace, seed: int, count: int, data: st.DataObject
) -> None:
    ranks = program(seed, count)
    lines = data.draw(st.sampled_from(ranks))
    chosen = data.draw(st.sampled_from(lines))
    reached = {chosen[0]}
    for number, _, after in lines:
        if reached.intersection(after):
            reached.add(number)
    back = data.draw(st.sampled_from(sorted(reached)))
    place = lines.index(chosen)
    lines[place] = (chosen[0], chosen[1], (*chosen[2], back))
    (finding,) = findings(make, ranks)
    assert finding.rule == ("self-dependency" if back == chosen[0] else "cycle")
    assert finding.file == f"w.{ranks.index(lines)}.et"
    if finding.rule == "cycle":
        assert f" {chosen[0]} waits for {back}" in f" {finding.message}" or "..." in finding.message


@generated
@given(seed=seeds, count=steps, data=st.data())
def test_a_lost_or_changed_communication_is_found(
    make: SimpleNamespace, seed: int, count: int, data: st.DataObject
) -> None:
    ranks = program(seed, count)
    places = [
        (rank, place)
        for rank, lines in enumerate(ranks)
        for place, line in enumerate(lines)
        if not line[1].startswith("comp")
    ]
    if not places:
        return
    rank, place = data.draw(st.sampled_from(places))
    number, text, after = ranks[rank][place]
    changed = data.draw(st.sampled_from(["comp us=1", f"{text}0"]))
    if changed.startswith("coll"):
        changed = text.replace("comm_size=", "comm_size=1")
    ranks[rank][place] = (number, changed, after)
    rules = {finding.rule for finding in findings(make, ranks)}
    expected = {"collective-sequence", "unmatched-recv", "unmatched-send"}
    assert rules & expected, rules


@generated
@given(seed=seeds, count=steps, data=st.data())
def test_swapping_two_communications_stalls_or_passes_by_the_order(
    make: SimpleNamespace, seed: int, count: int, data: st.DataObject
) -> None:
    """A stall is always explained, and only stalls are reported."""
    ranks = program(seed, count)
    rank = data.draw(st.integers(0, RANKS - 1))
    places = [p for p, line in enumerate(ranks[rank]) if not line[1].startswith("comp")]
    if len(places) < 2:
        return
    first, second = data.draw(
        st.lists(st.sampled_from(places), min_size=2, max_size=2, unique=True)
    )
    left, right = ranks[rank][first], ranks[rank][second]
    ranks[rank][first] = (left[0], right[1], left[2])
    ranks[rank][second] = (right[0], left[1], right[2])
    rules = {finding.rule for finding in findings(make, ranks)}
    assert (not rules) == finishes(ranks)


def finishes(ranks: list[list[Line]]) -> bool:
    """Run the communication of each rank, a chain here, the plain way."""
    queues = [[line[1] for line in lines if not line[1].startswith("comp")] for lines in ranks]
    sent: list[tuple[int, str]] = []
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            kind, first, rest = (*queue[0].split(" ", 2), "")[:3] if queue else ("", "", "")
            peer = int(first.rpartition("=")[2]) if first else -1
            if kind == "send":
                sent.append((rank, f"{peer} {rest}"))
                moved = bool(queue.pop(0))
            elif kind == "recv" and (peer, f"{rank} {rest}") in sent:
                sent.remove((peer, f"{rank} {rest}"))
                moved = bool(queue.pop(0))
            elif kind == "coll":
                members = GROUPS[queue[0].rpartition("=")[2]]
                if all(queues[member][:1] == queue[:1] for member in members):
                    for member in members:
                        queues[member] = queues[member][1:]
                    moved = True
    return not any(queues)
