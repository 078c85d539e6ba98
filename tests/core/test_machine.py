"""The garbage collector of a block that keeps its objects."""

import gc

from art_nb.core.machine import without_garbage_collection


def generation(value):
    return next((g for g in range(3) if any(each is value for each in gc.get_objects(generation=g))), None)


def test_objects_of_a_block_are_in_the_oldest_generation():
    gc.unfreeze()
    with without_garbage_collection():
        kept = [[]]
    assert gc.isenabled() and generation(kept) == 2


def test_frozen_objects_stay_frozen():
    frozen = [[]]
    gc.freeze()
    try:
        with without_garbage_collection():
            kept = [[]]
        assert generation(frozen) is None and generation(kept) == 0
    finally:
        gc.unfreeze()
