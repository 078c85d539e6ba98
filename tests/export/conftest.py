"""The trained model and its replies, once for each file."""

import pytest


@pytest.fixture(scope="module")
async def replies(tmp_path_factory):
    """A trained run, and our greedy replies to 50 questions."""
    from support.exported_replies import trained_replies

    return await trained_replies(tmp_path_factory.mktemp("replies"))
