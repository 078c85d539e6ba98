"""Compute losses with the code of TRL and verl themselves: golden values for tests/learners/test_audit_losses.py.

    pip download --no-deps trl==1.16.0 verl==0.9.1 && unzip the two wheels
    python tools/peer_losses.py --trl DIR_OF_TRL --verl DIR_OF_VERL             # writes tests/learners/peer_losses.json
    python tools/peer_losses.py --trl … --verl … --compare 200                  # 200 random batches against our losses

TRL's `_compute_loss`, its advantages and its vLLM weights are cut out of `grpo_trainer.py` by `ast` and run on a
stand-in for the trainer. verl's `core_algos.py` is run as it is, with stand-ins for its imports. Neither package must
be installed.
"""

import argparse
import ast
import json
import math
import sys
import textwrap
import types
from collections import defaultdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch

BATCH = 4  # rollouts of each of three prompts; the first prompt has equal rewards
LONGEST = 8


def draw(seed: int) -> dict[str, torch.Tensor]:
    """Return a random step: rewards, mask and logprobs [B, T] in float64."""
    rng = torch.Generator().manual_seed(seed)
    normal = lambda scale: torch.randn(3 * BATCH, LONGEST, generator=rng, dtype=torch.float64) * scale
    sizes = torch.randint(1, LONGEST + 1, (3 * BATCH,), generator=rng)
    new = -normal(1.0).abs() - 0.05
    old = new + normal(0.4)
    sampling = old + normal(0.3)
    sampling[1, 0] = math.nan  # unknown to the sampler
    rewards = torch.rand(3 * BATCH, generator=rng, dtype=torch.float64).round(decimals=1)
    rewards[:BATCH] = 1.0
    return {
        "new": new,
        "old": old,
        "sampling": sampling,
        "reference": new + normal(0.3),
        "entropy": normal(1.0).abs(),
        "mask": (torch.arange(LONGEST) < sizes[:, None]).double(),
        "rewards": rewards,
    }


def function_node(source: str, name: str) -> ast.FunctionDef:
    return next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == name)


def function_of(source: str, name: str, **scope):
    """Return a function or method of a module, without its decorators and annotations, in a separate scope."""
    node = function_node(source, name)
    node.decorator_list, node.returns = [], None
    for argument in node.args.args:
        argument.annotation = None
    scope |= {"torch": torch, "math": math}
    exec(compile(ast.Module([node], []), name, "exec"), scope)
    return scope[name]


def block_of(source: str, function: str, test: str, marker: str):
    """Return code that runs the one `if` statement of a function with this test that mentions `marker`."""
    nodes = [
        node
        for node in ast.walk(function_node(source, function))
        if isinstance(node, ast.If) and ast.unparse(node.test) == test and marker in ast.unparse(node)
    ]
    code = compile(ast.Module([nodes[0]], []), function, "exec")

    def run(**scope):
        exec(code, {"torch": torch, "math": math}, scope)
        return scope

    return run


class Trl:
    """TRL's own code, with a stand-in for its trainer."""

    def __init__(self, root: Path):
        self.source = (root / "trl" / "trainer" / "grpo_trainer.py").read_text()
        part = lambda name, **scope: function_of(self.source, name, **scope)
        minimum = lambda x: x[~x.isnan()].min()
        self.compute_loss = part("_compute_loss", nanmin=minimum, nanmax=lambda x: x[~x.isnan()].max())
        self.advantages_block = block_of(
            self.source,
            "_generate_and_score_completions",
            "self.multi_objective_aggregation == 'sum_then_normalize'",
            "std_rewards",
        )
        self.weights_block = block_of(
            self.source,
            "_generate_and_score_completions",
            "self.use_vllm and self.vllm_importance_sampling_correction",
            "invalid_mis_mask",
        )
        utils = (root / "trl" / "trainer" / "utils.py").read_text()
        self.nanstd = function_of(utils, "nanstd")

    def advantages(self, rewards: torch.Tensor, scale: str) -> torch.Tensor:
        this = SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize", reward_weights=torch.ones(1).double(), scale_rewards=scale
        )
        return self.advantages_block(
            self=this,
            rewards_per_func=rewards[:, None],
            device="cpu",
            num_generations=BATCH,
            unscorable_mask=torch.zeros(len(rewards), dtype=torch.bool),
            nanstd=self.nanstd,
        )["advantages"]

    def loss(self, step: dict[str, torch.Tensor], options: dict) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the loss of a step and the metrics that TRL logs."""
        this = SimpleNamespace(
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            aux_loss_enabled=False,
            use_adaptive_entropy=False,
            importance_sampling_level=options["level"],
            loss_type=options["loss_type"],
            beta=options["beta"],
            epsilon_low=options["epsilon"],
            epsilon_high=options["epsilon_high"],
            entropy_coef=options["entropy_coef"],
            _entropy_bonus_enabled=bool(options["entropy_coef"]),
            max_completion_length=LONGEST,
            use_vllm=options["mode"] is not None,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=options["mode"],
            vllm_importance_sampling_clip_min=None,
            vllm_importance_sampling_clip_max=1.5,
            current_gradient_accumulation_steps=1,
            args=SimpleNamespace(use_bias_correction_kl=False, delta=options["delta"], steps_per_generation=1),
            model=SimpleNamespace(training=True),
            _metrics={"train": defaultdict(list)},
            accelerator=SimpleNamespace(
                num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
            ),
            _get_per_token_logps_and_entropies=lambda *_, **__: (step["new"], step["entropy"], None),
        )
        inputs = {
            "prompt_ids": step["mask"],
            "prompt_mask": step["mask"],
            "completion_ids": step["mask"],
            "completion_mask": step["mask"],
            "advantages": step["advantages"],
            "old_per_token_logps": step["old"],
            "ref_per_token_logps": step["reference"],
            "num_items_in_batch": step["mask"].sum(),
        }
        if options["mode"]:
            inputs["importance_sampling_ratio"] = self.weights_block(
                self=this,
                completion_mask=step["mask"],
                tool_mask=None,
                old_per_token_logps=step["old"],
                sampling_per_token_logps=step["sampling"],
            )["vllm_importance_sampling_ratio"]
        loss = self.compute_loss(this, None, inputs)
        return loss, {name: values[0] for name, values in this._metrics["train"].items()}


def trl_cases():
    """Return pairs of equivalent options of TRL and art_nb."""
    modes = {
        None: {},
        "token_truncate": {"mismatch": "tis", "mismatch_options": {"is_max": 1.5}},
        "token_mask": {"mismatch": "mask", "mismatch_options": {"low": 0.0, "high": 1.5}},
        "sequence_truncate": {"mismatch": "sequence_truncate", "mismatch_options": {"is_max": 1.5}},
        "sequence_mask": {"mismatch": "sequence_mask", "mismatch_options": {"is_max": 1.5}},
    }
    around = {
        "grpo": ("grpo", "sequence"),
        "bnpo": ("grpo", "token"),
        "dr_grpo": ("dr_grpo", "constant"),
        "dapo": ("dapo", "token"),
        "cispo": ("cispo", "token"),
        "luspo": ("grpo", "constant"),
    }
    bands = [(0.2, 0.2, None), (0.1, 0.28, None), (0.2, 0.28, 1.6)]
    for kind, level, mode, beta in product(around, ("token", "sequence"), modes, (0.0, 0.1)):
        loss, reduction = around[kind]
        if kind == "luspo" and level == "token":
            continue
        for low, high, delta in bands if kind != "cispo" else [(0.2, cap, None) for cap in (5.0, 1.1)]:
            clip = {"is_max": high} if kind == "cispo" else {"eps_low": low, "eps_high": high, "delta": delta}
            entropy_coef = 0.05 if reduction == "token" and low == 0.2 else 0.0
            theirs = {
                "loss_type": kind,
                "level": level,
                "mode": mode,
                "beta": beta,
                "epsilon": low,
                "epsilon_high": high,
                "delta": delta,
                "entropy_coef": entropy_coef,
            }
            ours = {
                "loss": loss,
                "loss_options": clip | {"level": level},
                "reduction": reduction,
                "kl_coef": beta,
                "max_tokens": 1 if kind == "luspo" else LONGEST,
                "entropy_coef": entropy_coef,
            } | modes[mode]
            yield "trl", theirs, ours


class Verl:
    """verl's own code with stand-ins for its imports."""

    def __init__(self, root: Path):
        stand_ins = {
            "omegaconf": {"DictConfig": dict},
            "verl": {},
            "verl.utils": {"as_torch_index": None, "group_mean_std": None},
            "verl.trainer": {},
            "verl.workers": {},
            "verl.trainer.config": {"AlgoConfig": type("AlgoConfig", (), {})},
            "verl.workers.config": {"ActorConfig": ActorConfig},
            "verl.utils.import_utils": {"deprecated": lambda *_, **__: lambda function: function},
        }
        functional = (root / "verl" / "utils" / "torch_functional.py").read_text()
        masked_sum = function_of(functional, "masked_sum")
        stand_ins["verl.utils.torch_functional"] = {
            "masked_sum": masked_sum,
            "masked_mean": function_of(functional, "masked_mean", masked_sum=masked_sum),
        }
        for name, values in stand_ins.items():
            sys.modules[name] = module = types.ModuleType(name)
            vars(module).update(values)
        sys.modules["verl.utils"].torch_functional = sys.modules["verl.utils.torch_functional"]
        self.core = types.ModuleType("core_algos")
        sys.modules["core_algos"] = self.core
        path = root / "verl" / "trainer" / "ppo" / "core_algos.py"
        exec(compile(path.read_text(), str(path), "exec"), vars(self.core))
        correction = (root / "verl" / "trainer" / "ppo" / "rollout_corr_helper.py").read_text()
        self.weights = function_of(
            correction,
            "compute_rollout_correction_weights",
            verl_F=self.core.verl_F,
            SAFETY_BOUND=20.0,
            compute_is_metrics=lambda **_: {},
            _parse_rollout_is_threshold=lambda spec: (spec, None),
        )
        for name in ("torch_functional", "import_utils"):
            del sys.modules[f"verl.utils.{name}"]

    def advantages(self, rewards: torch.Tensor, scale: str) -> torch.Tensor:
        index = torch.arange(len(rewards)).div(BATCH, rounding_mode="floor").numpy()
        return self.core.compute_grpo_outcome_advantage(
            rewards[:, None].clone(),
            torch.ones(len(rewards), 1).double(),
            index,
            norm_adv_by_std_in_grpo=scale == "group",
        )[0][:, 0]

    def loss(self, step: dict[str, torch.Tensor], options: dict) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the loss of a step and the metrics that verl logs."""
        config = ActorConfig(
            clip_ratio=options["low"],
            clip_ratio_low=options["low"],
            clip_ratio_high=options["high"],
            clip_ratio_c=options["dual"],
            loss_scale_factor=LONGEST,
        )
        weights = None
        if options["rollout_is"]:
            log_ratio = torch.nan_to_num(step["old"] - step["sampling"], nan=0.0)
            weights = self.weights(log_ratio, step["mask"], options["rollout_is"], 1.5)[0]
        advantages = step["advantages"][:, None].expand_as(step["new"])
        loss, metrics = self.core.get_policy_loss_fn(options["loss"])(
            step["old"], step["new"], advantages, step["mask"], options["agg"], config, weights
        )
        if options["beta"]:
            loss = loss + options["beta"] * self.aggregate(
                self.core.kl_penalty(step["new"], step["reference"], "low_var_kl"), step["mask"], options["agg"]
            )
        if options["entropy_coef"]:
            loss = loss - options["entropy_coef"] * self.aggregate(step["entropy"], step["mask"], options["agg"])
        return loss, metrics

    def aggregate(self, values: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
        return self.core.agg_loss(loss_mat=values, loss_mask=mask, loss_agg_mode=mode, loss_scale_factor=LONGEST)


class ActorConfig(SimpleNamespace):
    """The part of verl's configuration that its losses read."""

    @property
    def global_batch_info(self) -> dict:
        return {"loss_scale_factor": self.loss_scale_factor}

    def get(self, name, default=None):
        return getattr(self, name, default)


def verl_cases():
    """Return pairs of equivalent options of verl and art_nb."""
    reductions = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}
    weights = {
        None: {},
        "token": {"mismatch": "tis", "mismatch_options": {"is_max": 1.5}},
        "sequence": {"mismatch": "sequence_truncate", "mismatch_options": {"is_max": 1.5}},
    }
    losses = {
        "vanilla": [(0.2, 0.2, 3.0), (0.2, 0.28, 1.2)],
        "gspo": [(3e-4, 4e-4, 3.0), (0.2, 0.3, 3.0)],
        "cispo": [(1.0, 4.0, 3.0), (0.2, 0.28, 3.0)],
        "dppo_tv": [(0.2, 0.2, 20.0), (0.05, 0.05, 20.0)],
    }
    names = {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo", "dppo_tv": "dppo"}
    for kind, agg, rollout_is, beta in product(losses, reductions, weights, (0.0, 0.1)):
        for low, high, dual in losses[kind]:
            clip = {"eps_low": low, "eps_high": high} | ({"dual_clip": dual} if kind == "vanilla" else {})
            clip = {"is_min": 1 - low, "is_max": 1 + high} if kind == "cispo" else clip
            clip = {"threshold": low, "kl_coef": 0.0} if kind == "dppo_tv" else clip
            theirs = {
                "loss": kind,
                "agg": agg,
                "rollout_is": rollout_is,
                "beta": beta,
                "low": low,
                "high": high,
                "dual": dual,
                "entropy_coef": beta / 2,
            }
            ours = {
                "loss": names[kind],
                "loss_options": clip,
                "reduction": reductions[agg],
                "kl_coef": beta,
                "entropy_coef": beta / 2,
                "max_tokens": LONGEST,
            }
            yield "verl", theirs, ours | weights[rollout_is]


def all_cases() -> list[tuple]:
    """Return (peer, its options, our options) of every comparison."""
    return [*trl_cases(), *verl_cases()]


def evaluate(peers: dict, case: tuple, step: dict[str, torch.Tensor]) -> dict:
    """Return a peer's loss, its gradient by the logprobs and entropies [2, B, T], and its metrics."""
    peer, options, _ = case
    step = step | {name: step[name].clone().requires_grad_() for name in ("new", "entropy")}
    step["advantages"] = step["advantages"][peer]
    loss, metrics = peers[peer].loss(step, options)
    gradients = torch.autograd.grad(loss, [step["new"], step["entropy"]], materialize_grads=True)
    return {"loss": loss.item(), "gradient": torch.stack(gradients), "metrics": metrics}


def step_of(peers: dict, seed: int) -> dict:
    """Return a random step with each peer's own advantages."""
    step = draw(seed)
    return step | {
        "advantages": {name: peer.advantages(step["rewards"], "group") for name, peer in peers.items()},
        "unscaled": {name: peer.advantages(step["rewards"], "none") for name, peer in peers.items()},
    }


def projections(seed: int = 0) -> torch.Tensor:
    """Return the four directions [4, 2, B, T] along which gradients are stored."""
    return torch.randn(4, 2, 3 * BATCH, LONGEST, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


STORED_METRICS = (
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "cispo_clip_ratio",
    "kl",
    "entropy",
    "actor/pg_clipfrac",
)


def golden(peers: dict) -> dict:
    """Return the inputs, and the peers' results in the order of `all_cases`, as JSON."""
    step, directions, results = step_of(peers, 0), projections(), []
    for case in all_cases():
        result = evaluate(peers, case, step)
        results.append(
            {
                "loss": result["loss"],
                "gradient": (directions * result["gradient"]).sum((1, 2, 3)).tolist(),
                "metrics": {k: v for k, v in result["metrics"].items() if k in STORED_METRICS},
            }
        )
    return {
        "versions": "trl 1.16.0, verl 0.9.1",
        "step": to_json(step),
        "directions": to_json(directions),
        "results": results,
    }


def to_json(values):
    if isinstance(values, dict):
        return {name: to_json(value) for name, value in values.items()}
    return [to_json(value) for value in values] if values.dim() else None if values.isnan() else values.item()


def from_json(values):
    if isinstance(values, dict):
        return {name: from_json(value) for name, value in values.items()}
    return torch.tensor(
        [
            [math.nan if x is None else x for x in row]
            if isinstance(row, list) and not isinstance(row[0], list)
            else row
            for row in values
        ],
        dtype=torch.float64,
    )


def compare(peers: dict, batches: int) -> None:
    """Print the largest relative difference of gradients to ours over random batches."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from learners.test_audit_losses import our_result

    worst, count = defaultdict(float), 0
    for seed in range(batches):
        step = step_of(peers, seed)
        for case in all_cases():
            theirs, ours = evaluate(peers, case, step), our_result(step, case[0], case[2])
            size = theirs["gradient"].abs().max().item()
            difference = (theirs["gradient"] - ours["gradient"]).abs().max().item() / (size or 1.0)
            key = case[0], case[1].get("loss_type") or case[1]["loss"]
            worst[key], count = max(worst[key], difference), count + 1
    print(f"{count} comparisons, {batches} batches; largest difference of a gradient, relative to its largest entry:")
    for key, value in sorted(worst.items()):
        print(f"  {key[0]:5} {key[1]:8} {value:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=textwrap.dedent(__doc__).split("\n")[0])
    parser.add_argument("--trl", type=Path, required=True, help="directory that holds the package trl")
    parser.add_argument("--verl", type=Path, required=True, help="directory that holds the package verl")
    parser.add_argument("--compare", type=int, default=0, help="random batches to compare instead of writing the file")
    arguments = parser.parse_args()
    peers = {"trl": Trl(arguments.trl), "verl": Verl(arguments.verl)}
    if arguments.compare:
        return compare(peers, arguments.compare)
    path = Path(__file__).parents[1] / "tests" / "learners" / "peer_losses.json"
    path.write_text(json.dumps(golden(peers), separators=(",", ":")) + "\n")
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
