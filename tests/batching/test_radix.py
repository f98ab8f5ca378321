"""The tree of a batch: every path spells its sequence, and no distinct prefix is there twice."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity_bento.batching.radix import Fold, fold

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)


def spelled(tree: Fold, tokens: list[int]) -> list[list[int]]:
    """What each edge's path and the edge itself spell."""
    ids = torch.tensor(tokens)[tree.index].tolist()
    return [
        [token for edge in (*tree.path(number), tree.edges[number]) for token in ids[edge.start : edge.end]]
        for number in range(len(tree.edges))
    ]


@given(SEQUENCES)
def test_every_distinct_prefix_is_one_node(sequences: list[list[int]]) -> None:
    tree = fold(sequences, least_gain=0)
    assert tree is not None and tree.causal
    tokens = [token for sequence in sequences for token in sequence]
    prefixes = {tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))}
    assert tree.nodes == len(prefixes)
    assert torch.equal(torch.tensor(tokens)[tree.index][tree.scatter], torch.tensor(tokens))
    # The node of each token belongs to an edge whose path ends, at the node, in the sequence's own prefix.
    texts = spelled(tree, tokens)
    edge_of = {node: number for number, edge in enumerate(tree.edges) for node in range(edge.start, edge.end)}
    at = 0
    for sequence in sequences:
        for position, node in enumerate(tree.scatter[at : at + len(sequence)].tolist()):
            edge = tree.edges[edge_of[node]]
            assert edge.depth + node - edge.start == position
            assert texts[edge_of[node]][: position + 1] == sequence[: position + 1]
        at += len(sequence)


@given(SEQUENCES)
def test_parents_stand_before_children_and_end_where_these_begin(sequences: list[list[int]]) -> None:
    tree = fold(sequences, least_gain=0)
    assert tree is not None
    covered = []
    for number, edge in enumerate(tree.edges):
        assert edge.parent < number and edge.length > 0
        parent = tree.edges[edge.parent] if edge.parent >= 0 else None
        assert edge.depth == (parent.depth + parent.length if parent is not None else 0)
        covered += range(edge.start, edge.end)
    assert sorted(covered) == list(range(tree.nodes))
    assert sorted(number for family in tree.families() for number in family) == list(range(len(tree.edges)))
    assert sorted(number for level in tree.generations() for number in level) == list(range(len(tree.edges)))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=4)), min_size=1, max_size=9)
)
def test_block_masks_share_the_whole_block_or_nothing(parts: list[tuple[int, list[int]]]) -> None:
    states = [[7], [7, 7, 1], [7, 7, 2]]
    sequences = [states[state] + question for state, question in parts]
    tree = fold(sequences, shared=[len(states[state]) for state, _ in parts], least_gain=0)
    assert tree is not None and not tree.causal
    used = {state for state, _ in parts}
    assert tree.nodes == sum(len(states[state]) for state in used) + sum(len(question) for _, question in parts)
    roots = [edge for edge in tree.edges if edge.parent < 0]
    assert sorted(edge.length for edge in roots) == sorted(len(states[state]) for state in used)
    assert all(tree.edges[edge.parent] in roots for edge in tree.edges if edge.parent >= 0)


def test_what_does_not_pay_is_not_folded() -> None:
    assert fold([[1, 2, 3], [4, 5, 6]]) is None
    assert fold([[1] * 100 + [2], [1] * 100 + [3]]) is not None
    assert fold([[1, 2, 3, 4], [1, 5, 6, 7]], least_gain=1.2) is None
