"""NCCL's trees: a binary tree over nodes, and its complement, with a chain inside each node.

After NCCL 2.28: `ncclGetBtree` and `ncclGetDtree` of `src/graph/trees.cc`, the balanced pattern of
`src/graph/connect.cc`, where the first child joins the first GPU of a node and the second the
second. Each channel begins its chains at another GPU.
"""

from collections.abc import Sequence

ROOT = -1


def tree(nodes: Sequence[Sequence[int]], number: int) -> list[int]:
    """Return the parent of each position, `ROOT` for the root.

    Args:
        nodes: positions of each node, in order.
        number: of the tree; odd ones are complements, and every second begins one GPU later.
    """
    parents = [ROOT] * sum(len(node) for node in nodes)
    turned = [_turned(node, number // 2) for node in nodes]
    above = [_parent(len(nodes), node, complement=number % 2 == 1) for node in range(len(nodes))]
    joined = [0] * len(nodes)  # children so far
    for node, chain in enumerate(turned):
        for place in range(1, len(chain)):
            parents[chain[place]] = chain[place - 1]
        if above[node] != ROOT:
            upper = turned[above[node]]
            parents[chain[0]] = upper[min(joined[above[node]], len(upper) - 1)]
            joined[above[node]] += 1
    return parents


def depth(nodes: Sequence[Sequence[int]]) -> int:
    """Return NCCL's measure of a tree's depth: hops inside a node, and levels of nodes."""
    return max(len(node) for node in nodes) - 1 + (len(nodes).bit_length() - 1)


def _turned(node: Sequence[int], by: int) -> list[int]:
    first = by % len(node)
    return [*node[first:], *node[:first]]


def _parent(count: int, node: int, *, complement: bool) -> int:
    if not complement:
        return _binary(count, node)
    if count % 2:  # shifted by one
        up = _binary(count, (node - 1) % count)
        return ROOT if up == ROOT else (up + 1) % count
    up = _binary(count, count - 1 - node)  # mirrored
    return ROOT if up == ROOT else count - 1 - up


def _binary(count: int, node: int) -> int:
    """Return the parent in a tree whose leaves are the odd numbers and whose root is 0."""
    if node == 0:
        return ROOT
    bit = node & -node
    up = (node ^ bit) | (bit << 1)
    return up if up < count else node ^ bit
