"""Loops like those of Tinker's cookbook, for the unmodified client. A process without art_nb can import this."""

import tinker
from tinker import types


def sl_datum(prompt, completion):
    """Return an item for supervised training on a completion."""
    tokens = [*prompt, *completion]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(completion)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def sl_loop(trainer, batches, learning_rate, first=0, save_at=None):
    """Train on each batch with a decreasing learning rate, and return the mean loss of each step.

    `save_at` is the step after which the state is saved. Its path is returned too.
    """
    losses, path = [], None
    for step, batch in enumerate(batches[first:], first):
        rate = learning_rate * (1 - step / len(batches))
        forward = trainer.forward_backward(batch, "cross_entropy")
        update = trainer.optim_step(types.AdamParams(learning_rate=rate))  # before the result of `forward` is read
        total, weight = forward.result().metrics["loss:sum"], 0.0
        for datum in batch:
            weight += sum(datum.loss_fn_inputs["weights"].data)
        update.result()
        losses.append(total / weight)
        if step == save_at:
            path = trainer.save_state(f"step-{step}").result().path
    return losses, path


def rl_datum(prompt, sequence, advantage):
    """Return an item for reinforcement learning on a sampled sequence."""
    tokens, before = [*prompt, *sequence.tokens], len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * before + [*sequence.logprobs],
            "advantages": [0.0] * before + [advantage] * len(sequence.tokens),
        },
    )


def rl_loop(trainer, prompts, reward, steps, *, group_size, learning_rate, params, loss="importance_sampling"):
    """Sample a group for each prompt, train on centered rewards, and return the mean reward of each step."""
    means = []
    for _ in range(steps):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        inputs = [types.ModelInput.from_ints(prompt) for prompt in prompts]
        pending = [sampler.sample(prompt=prompt, num_samples=group_size, sampling_params=params) for prompt in inputs]
        rewards, data = [], []
        for prompt, future in zip(prompts, pending):
            sequences = future.result().sequences
            values = [reward(sequence.tokens) for sequence in sequences]
            mean = sum(values) / len(values)
            rewards += values
            if max(values) > min(values):
                data += [rl_datum(prompt, s, value - mean) for s, value in zip(sequences, values)]
        means.append(sum(rewards) / len(rewards))
        if data:
            forward = trainer.forward_backward(data, loss)
            update = trainer.optim_step(types.AdamParams(learning_rate=learning_rate))
            forward.result()
            update.result()
    return means


def new_trainer(service, base_model, **options):
    """Return a training client."""
    return service.create_lora_training_client(base_model=base_model, **options).result()


def connect(server):
    """Return a client of a server. Requests for telemetry go to the same server."""
    return tinker.ServiceClient(base_url=server.url, api_key=server.api_key)
