"""benchmarks/gpu.py: its rows are those of docs/gpu.md, and it prints each of them, with or without a GPU."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.warm import warm_python

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="measures small sizes on a CPU")


def measured(*arguments):
    """Return the rows that the script prints, by name in the order of printing."""
    done = subprocess.run([warm_python(), SCRIPT, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["row"]: row for row in rows}


def documented():
    """Return the rows of the table in docs/gpu.md with their part and their value on a card."""
    section = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").partition("\n## Rows\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d) \| `([\w-]+)` \|.*\| ([^|]*) \|$", section, re.MULTILINE)
    return {name: (int(part), value) for part, name, value in rows}


@pytest.fixture(scope="module")
def without_gpu():
    return measured()


@needs_no_gpu
def test_the_documented_rows_are_printed_in_their_parts(without_gpu):
    assert {name: row["part"] for name, row in without_gpu.items()} == {
        n: part for n, (part, _) in documented().items()
    }
    assert list(without_gpu) == list(documented())


@needs_no_gpu
def test_without_a_gpu_rows_are_empty_and_give_the_reason(without_gpu):
    for name, row in without_gpu.items():
        assert row["device"] == "CPU" and row["versions"]["torch"] == torch.__version__
        assert name == "device" or row["empty"] == "no GPU"


@needs_no_gpu
@pytest.mark.slow
def test_the_learner_is_measured_with_small_sizes():
    rows = measured("--small", "--part", "2")
    assert list(rows) == [name for name, (part, _) in documented().items() if part == 2]
    shapes = {name: values for row in rows.values() for name, values in row.items() if name.startswith("Qwen")}
    assert list(shapes) == ["Qwen3-0.6B", "Qwen3-4B", "Qwen2.5-7B", "Qwen2.5-14B"]
    for values in shapes.values():
        assert values["tokens/s"] > 0 and values["peak GB"] > 0 and values["planned GB"] > 0
        assert 0 < values["share of measured peak"] < 1.5


@needs_no_gpu
@pytest.mark.full
def test_every_part_runs_with_small_sizes():
    rows = measured("--small")
    assert list(rows) == list(documented())
    assert not any("error" in row for row in rows.values())
    for name in ("device", "parity", "rates", "sync", "rollouts", "idle", "drift", "memory", "learning"):
        assert "empty" not in rows[name] and rows[name]["sizes"] == "small"
    assert rows["rollouts"]["rollouts/s over HTTP"] > 0
    assert 0 < rows["idle"]["idle share"] < 1
    assert max(rows["drift"]["logprob_diff_mean"]) < 0.1
    for name in (
        "shared",
        "own-copy",
        "unsloth",
        "vllm-unsloth",
        "two-devices",
        "trl",
        "prime-rl",
    ):  # need more than this machine
        assert rows[name].get("empty") or rows[name]["sizes"] == "small"


def test_the_flops_are_those_of_the_formula(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from gpu import trainer

    learner, _ = trainer.random_learner("Qwen2.5-7B", 32)
    config = learner.policy.model.config
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = (config.head_dim * n for n in (config.num_attention_heads, config.num_key_value_heads))
    shapes = [(hidden, query), (hidden, key), (hidden, key), (query, hidden), *[(hidden, inner)] * 2, (inner, hidden)]
    frozen = config.num_hidden_layers * sum(a * b for a, b in shapes)
    adapters = config.num_hidden_layers * sum(trainer.RANK * (a + b) for a, b in shapes)
    attention = 12 * config.num_hidden_layers * query * 3 * (32 * 33 // 2)
    head = 4 * hidden * config.vocab_size * 3 * 16  # half of each row is trained
    expected = (4 * frozen + 6 * adapters) * 96 + attention + head
    assert trainer.model_flops(learner.policy, trainer.training_rows(3, 32)) == expected


def test_the_nominal_peak_is_found_by_the_name_of_the_card(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from gpu import trainer

    names = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA A100-SXM4-40GB": 312e12}
    names |= {"NVIDIA H200": 989e12, "NVIDIA H200 NVL": 835e12}
    for name, peak in (names | {"Tesla T4": 65e12, "NVIDIA L40S": None, "CPU": None}).items():
        monkeypatch.setattr(trainer, "device_name", lambda name=name: name)
        assert trainer.nominal_peak() == peak


PRIME_RESULT = """
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
result = {
    "config": {"success": options["--model-name"] == "Qwen/Qwen3-0.6B", "error_reason": "CUDA out of memory"},
    "metrics": {"throughput": {"mean": 13342.0}, "mfu": {"mean": 10.9}, "peak_memory": {"gib": 5.0}},
}
json.dump(result, open(options["--output"], "w"))
"""


def test_results_of_prime_rl_are_read(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from gpu import common, peers

    monkeypatch.setenv("PRIME_RL", str(tmp_path))
    with pytest.raises(common.Empty, match="Set PRIME_RL to a checkout"):
        next(peers.prime_rl(tmp_path))
    script, uv = tmp_path / peers.PRIME_SCRIPT, tmp_path / "bin" / "uv"
    for path, text in ((script, PRIME_RESULT), (uv, '#!/bin/sh\nshift\nexec "$@"\n')):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{uv.parent}:{Path(sys.executable).parent}:/usr/bin:/bin")
    (row,) = peers.prime_rl(tmp_path)
    assert row["Qwen3-0.6B"] == {"tokens/s": 13342.0, "MFU": 0.109, "peak GB": pytest.approx(5.37, abs=0.01)}
    assert row["Qwen3-4B"] == {"error": "CUDA out of memory"}


@needs_no_gpu
@pytest.mark.parametrize(("limit_s", "why"), [(0, "of the part are over"), (0.2, "stopped after")])
def test_rows_say_that_the_time_of_the_part_is_over(monkeypatch, capsys, limit_s, why):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    script = runpy.run_path(str(SCRIPT))
    check = next(check for check in script["CHECKS"] if "rates" in check.rows)
    script["run_in_process"](check, Path("no-weights"), limit_s)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["row"] for row in rows] == ["parity", "rates", "sync"]
    assert all(why in row["error"] for row in rows)
