"""Replies, rows and learners for the rehearsal of the GPU path."""

import copy

import numpy as np
import torch
from support.families import plain, random_adapter, tokenizer

import art_nb as art
from art_nb.learners.base import Learner, StepConfig
from art_nb.policy import Policy
from art_nb.policy.adapters import load_adapter
from art_nb.policy.kernels import FrozenWeight, token_logprobs
from art_nb.policy.packing import Segment, WeightedRow

FAMILIES = ("llama", "qwen3", "qwen3_window", "gemma3", "mistral", "qwen2")
CONFIG = StepConfig(learning_rate=1e-4, max_grad_norm=1e9, tokens_per_batch=128, entropy_coef=0.01)
SEGMENTS = {
    "one": [(9, [])],
    "several": [(5, []), (1, []), (12, [])],
    "a tree": [(8, []), (3, [0, 1, 2, 3, 4]), (6, [0, 1, 2, 3, 4, 8]), (4, []), (1, [18, 19])],
}


def grouped_rows(groups=3, size=4, seed=0):
    """Return rows of several groups. The rows of a group have a common prefix and different lengths."""
    draw, rows = np.random.default_rng(seed), []
    for group in range(groups):
        prefix = draw.integers(3, 200, 10 + 8 * group)
        for i in range(size):
            tokens = np.concatenate([prefix, draw.integers(3, 200, 4 + 3 * i)]).astype(np.int32)
            sampled = np.arange(len(tokens)) >= len(prefix)
            logprobs = np.where(sampled, -5.5, np.nan).astype(np.float32)
            rows.append(WeightedRow(tokens, sampled, logprobs, group, advantage=i - 1.5, coef=1 / 40))
    return rows


def learner_on(device, family, dtype):
    """Return a learner whose adapter is the same on every device."""
    model = copy.deepcopy(plain(family)).to(dtype).to(device)
    model.tie_weights()
    policy = Policy(model, tokenizer())
    load_adapter(policy, {name: t.to(device) for name, t in random_adapter(policy, 5, 0.05).items()})
    return Learner(policy)


def gradient(device, family, dtype, checkpointing=False):
    """Return the loss and the gradient of a step with several micro-batches, on the CPU in fp32."""
    learner, found = learner_on(device, family, dtype), []
    learner.policy.checkpointing = checkpointing

    def keep(done, of, tokens):
        if done == of > 1:
            found.extend(p.grad.cpu().flatten() / learner.loss_factor for p in learner.parameters())

    metrics = learner.step(grouped_rows(), CONFIG, keep)
    return metrics["loss/train"], torch.cat(found)


def attended(prepare, device, dtype, made, window):
    """Return the output and the gradients of an attention function, in fp32 on the CPU."""
    ends, numbers = np.cumsum([size for size, _ in made]), torch.Generator().manual_seed(0)
    segments = [Segment(int(end) - n, int(end), torch.tensor(path).long()) for end, (n, path) in zip(ends, made)]
    draw = lambda heads: torch.randn(int(ends[-1]), heads, 16, generator=numbers).bfloat16().to(dtype).to(device)
    q, k, v = (draw(heads).requires_grad_() for heads in (6, 2, 2))
    out = prepare(segments, q.device)(q, k, v, 0.3, window)
    out.backward(draw(6))
    return [t.detach().cpu().float() for t in (out, q.grad, k.grad, v.grad)]


def scored(device, dtype, head_dtype, scale):
    """Return logprobs, entropies and their gradients for a large vocabulary, in fp32 on the CPU."""
    numbers, (N, V, H) = torch.Generator().manual_seed(0), (9, 50_000, 64)
    hidden = (torch.randn(N, H, generator=numbers) * scale).bfloat16().to(dtype).to(device).requires_grad_()
    head = (torch.randn(V, H, generator=numbers) / 8).bfloat16().to(head_dtype).to(device)
    targets = torch.arange(N)
    targets[: N // 2] = (hidden.detach().cpu().float() @ head.cpu().float().T).argmax(-1)[: N // 2]
    results = token_logprobs(hidden, FrozenWeight(head), targets.to(device), 0.8, chunk=4)
    grads = [torch.autograd.grad(result.sum(), hidden, retain_graph=True)[0] for result in results]
    return [t.detach().cpu().float() for t in (*results, *grads)]


async def reply(model, seed, name="", **options):
    """Return a reply of the endpoint."""
    answer = await model.openai_client().chat.completions.create(
        model=name or model.get_inference_name(),
        messages=[{"role": "user", "content": f"A{seed % 3} free: B1 C2"}],
        logprobs=True,
        seed=seed,
        **{"max_tokens": 16, "extra_body": {"ignore_eos": True}} | options,
    )
    return answer.choices[0]


def groups_of(choices):
    """Return groups of trajectories with the given replies."""
    return [
        art.TrajectoryGroup(
            art.Trajectory(
                messages_and_choices=[{"role": "user", "content": f"A{g} free: B1 C2"}, choice], reward=float(i)
            )
            for i, choice in enumerate(choices[g::3])
        )
        for g in range(3)
    ]
