"""`art.view` of a directory with several runs is a list of them."""

import pytest

import art_nb as art
from art_nb.core.types import StoreError


def test_a_directory_of_runs_is_listed(tmp_path):
    for name in ("one", "<two>"):
        art.RunStore(tmp_path / ".art" / "games" / "models" / name).append_history({"step": 1, "train/reward": 0.25})
    listed = art.view(str(tmp_path / ".art"))
    assert [path.name for path in listed.runs] == ["<two>", "one"]
    assert f'art.view("{(tmp_path / ".art/games/models/one").as_posix()}")  # 1 step, reward 0.25 → 0.25' in str(listed)
    assert "models/&lt;two&gt;" in listed._repr_html_()
    assert art.view(tmp_path / ".art" / "games" / "models" / "one").html()


def test_a_path_that_does_not_exist(tmp_path):
    with pytest.raises(StoreError, match="There is no .*nowhere"):
        art.view(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="holds no rollouts"):
        art.view(str(tmp_path))
