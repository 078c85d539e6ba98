"""One Ray cluster for all tests of this folder that need Ray (`make test-ray`)."""

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("ray") else ["test_ray_*.py"]


@pytest.fixture(scope="session")
def cluster():
    """A connection to a cluster that is started for the tests, and ends with them."""
    from art_nb.distributed.placement import connect_cluster

    connection = connect_cluster("local")
    yield connection
    connection.close()


@pytest.fixture(scope="module")
def make_backend(cluster, tmp_path_factory):
    """A maker of backends of the tiny model in fp32 on the CPU."""
    import art_nb as art

    def make(samplers=2, learners=1, **options):
        path = options.pop("path", None) or tmp_path_factory.mktemp("runs")
        return art.RayBackend(
            samplers=samplers, learners=learners, path=path, device="cpu", dtype="float32", verbose=False, **options
        )

    return make


@pytest.fixture(scope="module")
def make_model(tiny_model_dir):
    """A maker of trainable models."""
    import art_nb as art

    return lambda name: art.TrainableModel(name=name, project="tests", base_model=str(tiny_model_dir))
