"""The garbage collector of a block that keeps its objects."""

import gc

from art_nb.core.machine import YOUNG_OBJECTS, without_garbage_collection


def generation(value):
    return next((g for g in range(3) if any(each is value for each in gc.get_objects(generation=g))), None)


def test_many_objects_of_a_block_are_in_the_oldest_generation():
    gc.unfreeze()
    with without_garbage_collection():
        kept = [[] for _ in range(2 * YOUNG_OBJECTS)]  # some lists are reused and not counted
    assert gc.isenabled() and generation(kept) == 2


def test_a_small_block_does_not_count_frozen_objects(monkeypatch):
    """Counting a million of them takes 0.1 s, and a group is read in less."""
    gc.collect()
    monkeypatch.setattr(gc, "get_freeze_count", None)
    with without_garbage_collection():
        kept = [[]]
    assert generation(kept) == 0


def test_frozen_objects_stay_frozen():
    frozen, thresholds = [[]], gc.get_threshold()
    gc.freeze()
    gc.set_threshold(10**6)  # no collection after the block
    try:
        with without_garbage_collection():
            kept = [[] for _ in range(2 * YOUNG_OBJECTS)]  # some lists are reused and not counted
        assert generation(frozen) is None and generation(kept) == 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
