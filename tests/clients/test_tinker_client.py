"""The unmodified client of Tinker trains on our server (`make test-clients`)."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.tinker_parts import serving
from transformers import AutoModelForCausalLM

tinker = pytest.importorskip("tinker", reason="needs Tinker's client: make test-clients")

from support.tinker_loops import connect, new_trainer, rl_loop, sl_datum, sl_loop  # noqa: E402
from tinker import types  # noqa: E402

from art_nb.models.tiny import save_tiny_model, tiny_tokenizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
PAIRS = [("user A1", "free"), ("user B2", "move"), ("user C3", "the move"), ("user A2", "system")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def sharp_model_dir(tmp_path_factory):
    """The tiny model with five times larger logits: its own can hardly prefer a token."""
    directory = save_tiny_model(tmp_path_factory.mktemp("models") / "sharp")
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        model.model.norm.weight.mul_(5)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def server(sharp_model_dir, runs):
    with serving(sharp_model_dir, runs) as running:
        yield running


@pytest.fixture
def service(server):
    client = connect(server)
    yield client
    client.close("success")


def batches(steps):
    tokenizer = tiny_tokenizer()
    data = [sl_datum(tokenizer.encode(prompt), [*tokenizer.encode(reply), 2]) for prompt, reply in PAIRS]
    return [data] * steps


def test_supervised_training(service, sharp_model_dir, runs):
    trainer = new_trainer(service, str(sharp_model_dir), rank=16, seed=1)
    losses, _ = sl_loop(trainer, batches(12), 0.01)
    assert losses[-1] < 0.3 * losses[0], losses
    sampler = trainer.save_weights_and_get_sampling_client().result()
    tokenizer = trainer.get_tokenizer()
    prompt = types.ModelInput.from_ints(tokenizer.encode(PAIRS[0][0]))
    reply = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=20, temperature=0.0)).result().sequences[0]
    logprobs = sampler.compute_logprobs(types.ModelInput.from_ints([*prompt.to_ints(), *reply.tokens])).result()
    assert np.allclose(logprobs[prompt.length :], reply.logprobs, atol=1e-3)
    (run,) = [path for path in (runs / "tinker" / "models").iterdir() if path.name.startswith(trainer.model_id[:24])]
    assert (run / "trajectories" / "train" / "0012.parquet").exists()


def test_training_continues_on_another_server(sharp_model_dir, tmp_path):
    """The server is restarted after step 3. The losses are those of a run without an interruption."""
    steps = batches(6)
    with serving(sharp_model_dir, tmp_path) as server:
        service = connect(server)
        trainer = new_trainer(service, str(sharp_model_dir), rank=4, seed=1)
        expected, path = sl_loop(trainer, steps, 0.02, save_at=2)
    with serving(sharp_model_dir, tmp_path) as server:
        service = connect(server)
        trainer = service.create_training_client_from_state_with_optimizer(path).result()
        losses, _ = sl_loop(trainer, steps, 0.02, first=3)
        assert losses == pytest.approx(expected[3:], rel=1e-4)
        sampler = service.create_sampling_client(model_path=path).result()
        assert sampler.get_base_model() == str(sharp_model_dir)
        service.close("success")


def low_share(tokens):
    """The reward of the tiny model: the share of tokens with an ID below 100."""
    return sum(token < 100 for token in tokens) / len(tokens)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_reinforcement_learning_raises_the_reward(service, sharp_model_dir, loss):
    trainer = new_trainer(service, str(sharp_model_dir), rank=16, seed=2)
    params = types.SamplingParams(max_tokens=2, temperature=1.0, stop=[], seed=1)
    options = {"group_size": 32, "learning_rate": 0.02, "params": params, "loss": loss}
    rewards = rl_loop(trainer, [[5, 6, 7], [9, 8]], low_share, 12, **options)
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15, rewards


def test_two_clients_at_the_same_time(server, sharp_model_dir):
    """Each of two clients gets the losses that it gets alone."""

    def train(seed):
        service = connect(server)
        try:
            return sl_loop(new_trainer(service, str(sharp_model_dir), rank=2 + seed, seed=seed), batches(5), 0.02)[0]
        finally:
            service.close("success")

    alone = [train(seed) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(train, (1, 2))] == [pytest.approx(losses, rel=1e-4) for losses in alone]
    assert alone[0] != pytest.approx(alone[1], rel=1e-3)


def test_a_custom_loss(service, sharp_model_dir):
    """A function of the client with the formula of cross-entropy gives its gradient."""
    data = batches(1)[0]

    def mean_square(items, logprobs):
        loss = sum(
            (lp.square() * torch.tensor(i.loss_fn_inputs["weights"].data)).sum() for i, lp in zip(items, logprobs)
        )
        return loss, {"items": float(len(items))}

    trainer = new_trainer(service, str(sharp_model_dir), rank=4, seed=1)
    losses = []
    for _ in range(6):
        forward = trainer.forward_backward_custom(data, mean_square)
        update = trainer.optim_step(types.AdamParams(learning_rate=0.005))
        losses.append(forward.result().metrics["loss:sum"])
        update.result()
    assert losses[-1] < 0.7 * losses[0]

    def cross_entropy(items, logprobs):
        return -sum((lp * torch.tensor(i.loss_fn_inputs["weights"].data)).sum() for i, lp in zip(items, logprobs)), {}

    def norm(send):
        trainer = new_trainer(service, str(sharp_model_dir), rank=4, seed=1)
        future = send(trainer)
        update = trainer.optim_step(types.AdamParams(learning_rate=0.02))
        future.result()
        return update.result().metrics["grad_norm"]

    custom = norm(lambda trainer: trainer.forward_backward_custom(data, cross_entropy))
    assert custom == pytest.approx(norm(lambda trainer: trainer.forward_backward(data, "cross_entropy")), rel=1e-5)


def test_a_large_request_is_sent_in_parts(service, sharp_model_dir):
    """600 items are more than a request may have: the client splits them and joins the results in order."""
    tokenizer = tiny_tokenizer()
    data = [sl_datum([5, 6, k % 200 + 10], tokenizer.encode("free")) for k in range(600)]
    trainer = new_trainer(service, str(sharp_model_dir), rank=2, seed=1)
    outputs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    assert len(outputs) == 600
    one = trainer.forward(data[437:438], "cross_entropy").result().loss_fn_outputs[0]
    assert np.allclose(outputs[437]["logprobs"].data, one["logprobs"].data, atol=1e-4)


def test_errors_reach_the_client(service, sharp_model_dir):
    trainer = new_trainer(service, str(sharp_model_dir), rank=2, seed=1)
    data = batches(1)[0]
    with pytest.raises(tinker.RequestFailedError, match="does not use 'weights'"):
        trainer.forward_backward(data, "ppo").result()
    with pytest.raises(Exception, match="has no base model"):
        service.create_lora_training_client(base_model="unknown", rank=2).result()
    with pytest.raises(Exception, match="no checkpoint|There is no run"):
        service.create_training_client_from_state("tinker://a:train:0/weights/b").result()


def test_the_rest_client(service, server, sharp_model_dir):
    trainer = new_trainer(service, str(sharp_model_dir), rank=2, seed=1, user_metadata={"note": "x"})
    path = trainer.save_state("one", ttl_seconds=3600).result().path
    rest = tinker.RestClient(base_url=server.url, api_key=server.api_key)
    run = rest.get_training_run(trainer.model_id).result()
    assert run.lora_rank == 2 and run.user_metadata == {"note": "x"}
    (checkpoint,) = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert checkpoint.tinker_path == path and checkpoint.expires_at is not None
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert info.base_model == str(sharp_model_dir) and info.train_unembed is False
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(trainer.model_id).result().checkpoints == []


def test_a_wrong_key_is_refused(server):
    with pytest.raises(Exception, match="key is missing or wrong"):
        tinker.ServiceClient(base_url=server.url, api_key="tml-wrong").create_lora_training_client("tiny").result()


QUESTIONS = ["Is the sky blue?", "Should I buy a boat?", "Is it going to rain?", "Do cats like water?"]
ANSWERS = ("yes", "no", "maybe")


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_smollm2_learns_with_reinforcement_learning(smollm2_dir, tmp_path):
    """A loop like the cookbook's `rl_loop` on smollm2-135m: more replies begin with one of three words."""
    with serving("smollm2-135m", tmp_path, dtype=None, max_running=32) as server:
        service = connect(server)
        trainer = new_trainer(service, "smollm2-135m", rank=16, seed=1)
        tokenizer = trainer.get_tokenizer()

        def reward(tokens):
            words = tokenizer.decode(tokens).lower().split()
            return float(bool(words) and words[0].removesuffix("<|im_end|>").strip(".,!") in ANSWERS)

        texts = [f"{question} Answer with yes, no or maybe." for question in QUESTIONS]
        prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
            for text in texts
        ]
        params = types.SamplingParams(max_tokens=6, temperature=1.0)
        rewards = rl_loop(trainer, prompts, reward, 8, group_size=16, learning_rate=2e-4, params=params)
        print([round(value, 3) for value in rewards])
        assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.3, rewards
        service.close("success")
