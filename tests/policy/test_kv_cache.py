"""The cache of prefixes: which pages are removed when it is full."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from art_nb.policy.kv_cache import BLOCK, PrefixCache, block_hashes

PAGE_BYTES = 2 * BLOCK * 4 * 4  # one layer, one head of 4 numbers, keys and values in float32


def kv_of(hashes):
    """Keys and values in which each block holds its own hash."""
    blocks = torch.tensor([h % 1000 for h in hashes], dtype=torch.float32).repeat_interleave(BLOCK)
    return blocks[None, None, None, :, None].expand(1, 2, 1, -1, 4).clone()


def add(cache, hashes):
    cache.add(hashes, kv_of(hashes))


def test_a_conversation_does_not_remove_its_own_beginning():
    cache = PrefixCache(3 * PAGE_BYTES)
    growing, other = block_hashes(range(3 * BLOCK), "a"), block_hashes(range(BLOCK), "b")
    add(cache, growing[:2])
    add(cache, other)
    add(cache, growing)  # the least recently used page is its own second block
    assert (cache.find(growing), cache.find(other)) == (3 * BLOCK, 0)
    assert torch.equal(cache.get(growing), kv_of(growing))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6)), max_size=12), st.integers(1, 5))
def test_the_latest_conversation_is_stored_as_far_as_it_fits(said, pages):
    cache = PrefixCache(pages * PAGE_BYTES)
    for seed, blocks in said:
        hashes = block_hashes(range(blocks * BLOCK), seed)
        add(cache, hashes)
        found = cache.find(hashes) // BLOCK
        assert found == min(blocks, pages)
        assert torch.equal(cache.get(hashes[:found]), kv_of(hashes[:found]))
        assert cache.bytes <= pages * PAGE_BYTES
