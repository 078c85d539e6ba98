"""The options of `art-nb run` for a cluster, and the message without Ray."""

from importlib.util import find_spec

import pytest

from art_nb.cli.main import main


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_message_says_what_to_install(tmp_path, capsys):
    assert main(["run", "--backend", "ray", "--path", str(tmp_path), "--port", "0"]) == 1
    said = capsys.readouterr().err
    assert 'pip install "art_nb[ray]"' in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("options", [["--samplers", "2"], ["--learners", "1"], ["--address", "local"]])
def test_options_of_a_cluster_need_a_cluster(options, capsys):
    assert main(["run", *options]) == 1
    assert f"{options[0]} needs --backend ray" in capsys.readouterr().err


def test_tinker_has_no_cluster(capsys):
    assert main(["run", "--tinker", "--backend", "ray"]) == 1
    assert "--tinker trains on this machine" in capsys.readouterr().err
