import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paellapy.instrument.gpu_model.tables import heap_pop, heap_push, new_tree, tree_first, tree_rebuild, tree_set

# The functions exist compiled only inside their callers; here they run as plain Python.
keys = st.integers(0, 20).map(float)  # few values, so that there are ties


@given(st.lists(st.one_of(keys, st.none()), max_size=60))
def test_a_heap_gives_the_least_first_and_ties_to_the_lower_id(operations: list[float | None]):
    base = 3  # a heap may lie inside a larger array
    heap, ids = np.zeros(base + 64), np.zeros(base + 64, np.int64)
    inside: list[tuple[float, int]] = []
    for k, key in enumerate(operations):
        if key is not None:
            heap_push.py_func(heap, ids, base, len(inside), key, k)  # type: ignore[attr-defined]
            inside.append((key, k))
        elif inside:
            assert (heap[base], ids[base]) == min(inside)
            inside.remove(min(inside))
            heap_pop.py_func(heap, ids, base, len(inside) + 1)  # type: ignore[attr-defined]
    assert not inside or (heap[base], ids[base]) == min(inside)
    assert (heap[:base] == 0).all()


@given(st.integers(1, 40), st.data())
def test_a_tree_knows_its_least_leaf_after_any_change(leaves: int, data: st.DataObject):
    tree = new_tree(leaves)
    plain = np.full(leaves, np.inf)
    for leaf, key in data.draw(st.lists(st.tuples(st.integers(0, leaves - 1), keys), max_size=40)):
        plain[leaf] = key
        tree_set.py_func(tree, leaf, key)  # type: ignore[attr-defined]
        assert tree[1] == plain.min()
        assert tree_first.py_func(tree) == plain.argmin()  # type: ignore[attr-defined]
    again = new_tree(leaves)
    again[len(again) // 2 :][:leaves] = plain
    tree_rebuild.py_func(again)  # type: ignore[attr-defined]
    assert (again == tree).all()
