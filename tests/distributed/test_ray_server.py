"""`art-nb run --backend ray`: what the remote suite asks of every server, and a restart."""

import pytest
from support.registered import a_group, ask
from support.remote_parts import Server
from support.remote_tests import (  # noqa: F401
    test_a_checkpoint_is_pulled,
    test_a_remote_backend_keeps_the_contract,
    test_a_whole_run,
    test_a_wrong_key_is_rejected,
    test_both_spellings_log_on_both_sides,
    test_cancelling_undoes_the_step,
    test_checkpoints_are_deleted_and_forked_there,
    test_events_come_to_the_bus_here,
    test_sft,
    test_tokens_that_the_model_does_not_know_are_refused,
    test_two_clients_of_one_run,
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


def start(folder, **options):
    """A server with a cluster of its own, with one replica and one rank for each model."""
    cluster = ["--backend", "ray", "--samplers", "1", "--learners", "1", "--address", "local"]
    return Server(folder, options.get("key"), options.get("port", 0), *cluster, warm=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = start(tmp_path_factory.mktemp("far"))
    yield started
    assert started.end()[0] == 0


async def test_a_restarted_server_continues(named, tmp_path):
    server = start(tmp_path / "far")
    backend, model = server.client(tmp_path / "near"), named()
    await model.register(backend)
    assert (await backend.train(model, [await a_group(model)], learning_rate=1e-2)).step == 1
    before = await ask(model, temperature=0)
    assert server.end()[0] == 0
    server = start(tmp_path / "far", key=server.key, port=server.port)
    await model.register(backend)
    assert await model.get_step() == 1
    after = await ask(model, temperature=0)
    assert after.message == before.message
    assert (await backend.train(model, [await a_group(model)])).step == 2
    await backend.close()
    assert server.end()[0] == 0
