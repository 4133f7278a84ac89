"""Random programs of four ranks that run to their end."""

import random

RANKS = 4
GROUPS = {"1": [0, 1, 2, 3], "2": [0, 1], "3": [2, 3], "4": [0, 2], "5": [1, 3]}
COLLECTIVES = (0, 2, 6, 7)

Line = tuple[int, str, tuple[int, ...]]
"""Id, kind with attributes, ids waited for."""


def program(seed: int, steps: int) -> list[list[Line]]:
    """Make four ranks that carry out one random list of collectives, messages and kernels.

    Per rank, ids ascend in the order of the list and each communication waits for the one
    before it, so that the list itself is a run that finishes.
    """
    draw = random.Random(seed)
    ranks: list[list[Line]] = [[] for _ in range(RANKS)]
    last: list[int | None] = [None] * RANKS

    def add(rank: int, text: str, *, communicates: bool) -> None:
        lines = ranks[rank]
        after = {draw.choice(lines)[0] for _ in range(draw.randint(0, 2)) if lines}
        before = last[rank]
        if communicates and before is not None:
            after.add(before)
        number = lines[-1][0] + draw.randint(1, 3) if lines else draw.randint(0, 5)
        lines.append((number, text, tuple(sorted(after))))
        if communicates:
            last[rank] = number

    for _ in range(steps):
        match draw.randint(0, 2):
            case 0:
                add(draw.randrange(RANKS), f"comp us={draw.randint(0, 9)}", communicates=False)
            case 1:
                group = draw.choice(list(GROUPS))
                text = f"comm_type={draw.choice(COLLECTIVES)} comm_size={draw.randint(4, 6)}"
                for rank in GROUPS[group]:
                    add(rank, f"coll {text} pg_name={group}", communicates=True)
            case _:
                source, target = draw.sample(range(RANKS), 2)
                text = f"comm_tag={draw.randint(0, 1)} comm_size={draw.randint(1, 2)}"
                add(source, f"send comm_dst={target} {text}", communicates=True)
                add(target, f"recv comm_src={source} {text}", communicates=True)
    for rank in range(RANKS):
        add(rank, "comp us=1", communicates=False)
    return ranks
