"""What is held between two steps, at a depth that was not captured."""

from collections import Counter
from typing import NamedTuple

from onerank.converters.depths.growth import Stretch
from onerank.ir import Measurement

Sizes = dict[str, tuple[int, ...]]


class Held(NamedTuple):
    """Class of memory -> bytes, and pool, of each storage: as `Measurement` has them."""

    bytes: Sizes
    pools: Sizes


class Buckets(NamedTuple):
    """Bytes of DDP's buckets: in both captures, and at the model's own depth."""

    shallow: list[int]
    deep: list[int]
    made: list[int]


NO_BUCKETS = Buckets([], [], [])


def held_at_depth(
    shallow: Measurement, deep: Measurement, stretch: Stretch, buckets: Buckets = NO_BUCKETS
) -> Held:
    """Return what is held at the model's own depth; nothing where a capture does not tell.

    Storages that the deeper capture has more of are repeated; what has another size in each (a flat
    buffer of all parameters) is on the line through both. Buckets do neither.
    """
    sizes: Sizes = {}
    pools: Sizes = {}
    if not shallow.held_bytes or not deep.held_bytes:
        return Held(sizes, pools)
    for name in deep.held_bytes:
        few, many = _storages(shallow, name), _storages(deep, name)
        own = [_buckets_in(*pair) for pair in ((few, buckets.shallow), (many, buckets.deep))]
        apart = name == "other" and all(own)
        if apart:
            few, many = few - own[0], many - own[1]
        found = _grown(few, many, stretch)
        if found is not None and apart:
            pool = min(pool for _, pool in own[1])
            found = sorted([*found, *((size, pool) for size in buckets.made)], reverse=True)
        if found is None:
            return Held({}, {})
        sizes[name] = tuple(size for size, _ in found)
        pools[name] = tuple(pool for _, pool in found)
    return Held(sizes, pools if deep.held_pools else {})


def _storages(measured: Measurement, name: str) -> Counter[tuple[int, int]]:
    sizes = measured.held_bytes.get(name, ())
    pools = measured.held_pools.get(name, ()) or (0,) * len(sizes)
    return Counter(zip(sizes, pools, strict=True))


def _buckets_in(storages: Counter[tuple[int, int]], sizes: list[int]) -> Counter[tuple[int, int]]:
    """Return the storages that are buckets; none where not all of these sizes are there."""
    left = Counter(sizes)
    found = Counter[tuple[int, int]]()
    for (size, pool), count in storages.items():
        taken = min(count, left[size])
        found[size, pool] += taken
        left[size] -= taken
    return Counter() if left.total() else +found


def _grown(
    few: Counter[tuple[int, int]], many: Counter[tuple[int, int]], stretch: Stretch
) -> list[tuple[int, int]] | None:
    """Return (bytes, pool) of each storage, the largest first; None where fewer are held deeper."""
    kept = few & many
    other = sorted((few - kept).elements(), reverse=True)
    surplus = sorted((many - kept).elements(), reverse=True)
    if len(other) > len(surplus):
        return None
    found = Counter(kept)
    for (before, _), (after, pool) in zip(other, surplus, strict=False):
        found[stretch.number(before, after), pool] += 1
    for storage, count in Counter(surplus[len(other) :]).items():
        found[storage] += stretch.number(0, count)
    return sorted(found.elements(), reverse=True)
