"""The native library is as close to fp32 as PyTorch, for each family, number of tokens and adapter."""

import copy
import ctypes
import math

import pytest
import torch
from support.families import SHAPE
from transformers import AutoConfig, AutoModelForCausalLM

from art_nb.policy import native_library
from art_nb.policy.adapters import copy_adapter, load_adapter
from art_nb.policy.kernels import FrozenWeight, LowRankProduct, lora_product, token_logprobs
from art_nb.policy.kv_cache import KVSlots
from art_nb.policy.lora import Policy, modules_only, sequence_logprobs
from art_nb.policy.packing import Segment, native_attention, padded_attention, tree_attention

REASON = native_library.missing_requirement()
needs_library = pytest.mark.skipif(bool(REASON), reason=REASON)
VOCABULARY = 96
SIZES = SHAPE | dict(
    vocab_size=VOCABULARY, hidden_size=192, num_hidden_layers=3, num_attention_heads=6, head_dim=32
)  # the library needs multiples of 32
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 20},
    "qwen2": {},
    "qwen3": {"head_dim": 64, "num_key_value_heads": 1},
    "gemma3_text": {"sliding_window": 20, "layer_types": WINDOWS, "query_pre_attn_scalar": 48},
}


def policies_of(family):
    """A policy in bf16, and the same weights in fp32. Their adapter is not zero."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | FAMILIES[family]))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.08, mean=float("norm" in name and family != "gemma3_text"))
    model = model.bfloat16()
    policies = Policy(copy.deepcopy(model)), Policy(copy.deepcopy(model).float())
    shapes = {name: tensor.shape for name, tensor in copy_adapter(policies[0]).items()}
    adapter = {name: (0.08 * torch.randn(shape)).bfloat16().float() for name, shape in shapes.items()}
    for policy in policies:
        load_adapter(policy, adapter)
    return *policies, adapter


def parts_of(policy, adapter, n):
    """The trained adapter, the base model, another adapter, and all of them in one pass."""
    other = policy.cast({name: 0.5 * tensor for name, tensor in adapter.items()})
    several = [(weights, torch.arange(n)[i::3]) for i, weights in enumerate((None, other, policy.working))]
    without = [(other, torch.arange(n)[::2])]  # the base model computes the other tokens
    return None, [(None, None)], [(other, None)], [part for part in several if len(part[1])], without


def use_pytorch(monkeypatch, policy):
    """Let PyTorch compute everything, from the head to the norms."""
    for name in ("kernels.is_native", "kernels.has_panels", "lora.has_panels", "packing.has_tree_attention"):
        monkeypatch.setattr(f"art_nb.policy.{name}", lambda *_: False)
    monkeypatch.setattr(policy, "_native", None)
    monkeypatch.setattr(policy, "_head_product", FrozenWeight(policy._head().weight.float()))


def slots_of(policy, conversations, dtype=None):
    """Slots with 128 positions for a number of conversations, rounded up to a power of two."""
    slots = KVSlots(policy.model.config, dtype or policy.dtype, policy.device, 0)
    slots.max_bytes = slots.bytes(1 << (conversations - 1).bit_length(), 128)
    assert slots.room(conversations, 128)
    return slots


def logprobs_of(policy, cached, tokens, positions, owner, counts, parts):
    """Logprobs after new tokens in conversations with cached keys and values, and the stored keys and values."""
    slots = slots_of(policy, len(counts))
    slots.kv.copy_(cached)
    with torch.inference_mode():
        hidden = policy.hidden(tokens, positions, slots.attention(owner, positions, counts), parts)
        return policy.logits(hidden).log_softmax(-1), slots.kv.float()


def one_token(position, heads, size):
    """The arguments of `logprobs_of` for one token of a conversation, after random cached keys and values."""
    cached, first = torch.randn(3, 2, 1, heads, 128, size).bfloat16(), torch.zeros(1).long()
    return cached, torch.tensor([7]), torch.tensor([position]), first, [1], None


@needs_library
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_as_close_to_fp32_as_pytorch(family, monkeypatch):
    policy, exact, adapter = policies_of(family)
    assert policy.has_native_decoder and not exact.has_native_decoder
    errors, usual = [], []
    for counts, before in (([1], 40), ([1] * 3, 17), ([1] * 30, 33), ([5, 1, 7, 1], 40), ([60, 1, 30], 25), ([50], 0)):
        tokens = torch.randint(0, VOCABULARY, (sum(counts),))
        owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        positions = torch.cat([torch.arange(before, before + n) for n in counts])
        slots = slots_of(policy, len(counts), torch.bfloat16)
        inputs = torch.randn(slots.kv.shape).bfloat16(), tokens, positions, owner, counts
        for parts, exact_parts in zip(
            parts_of(policy, adapter, len(tokens)), parts_of(exact, adapter, len(tokens)), strict=True
        ):
            computed, stored = logprobs_of(policy, *inputs, parts)
            expected, exactly_stored = logprobs_of(exact, *inputs, exact_parts)
            with monkeypatch.context() as patch:
                use_pytorch(patch, policy)
                pytorch, _ = logprobs_of(policy, *inputs, parts)
            errors.append((computed - expected).abs().mean())
            usual.append((pytorch - expected).abs().mean())
            assert errors[-1] < 2 * usual[-1] + 1e-4, counts
            assert ((stored - exactly_stored).abs() <= 0.03 * exactly_stored.abs() + 0.05).float().mean() > 0.99
    assert sum(errors) < 1.1 * sum(usual)


@needs_library
def test_a_row_does_not_depend_on_the_others():
    policy, _, _ = policies_of("llama")
    tokens, positions, cached = torch.arange(30), torch.full((30,), 40), torch.randn(3, 2, 32, 2, 128, 32).bfloat16()
    together, _ = logprobs_of(policy, cached, tokens, positions, torch.arange(30), [1] * 30, None)
    for i in (0, 11, 29):
        alone, _ = logprobs_of(
            policy, cached[:, :, i : i + 1], tokens[i : i + 1], positions[:1], torch.zeros(1).long(), [1], None
        )
        assert torch.equal(alone[0], together[i])


@needs_library
def test_the_adapter_of_the_last_optimizer_step_is_used():
    (policy, _, adapter), inputs = policies_of("qwen3"), one_token(9, 1, 64)
    before, _ = logprobs_of(policy, *inputs)
    load_adapter(policy, {name: 0.5 * tensor for name, tensor in adapter.items()})
    after, _ = logprobs_of(policy, *inputs)
    assert (after - before).abs().max() > 0.01
    policy.drop_packed_weights()
    assert torch.equal(logprobs_of(policy, *inputs)[0], after)


@needs_library
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "relu"},
        {"head_dim": 24},
        {"num_attention_heads": 32},
        {"intermediate_size": 100},
        {"vocab_size": 100},  # the logits would depend on the batch
    ],
    ids=str,
)
def test_pytorch_computes_other_shapes(changes):
    def policy_with(changes):
        config = AutoConfig.for_model("llama", **SIZES | {"num_key_value_heads": 2} | changes)
        return Policy(AutoModelForCausalLM.from_config(config).bfloat16())

    assert policy_with({}).has_native_decoder and not policy_with(changes).has_native_decoder


def test_why_there_is_no_library(monkeypatch, tmp_path):
    monkeypatch.setenv("ART_NB_NATIVE", "0")
    assert "ART_NB_NATIVE" in native_library.missing_requirement()
    monkeypatch.delenv("ART_NB_NATIVE")
    monkeypatch.setattr(native_library, "_processor", lambda: "flags : sse avx2")
    assert "AVX2" in native_library.missing_requirement()  # without FMA
    monkeypatch.setattr(native_library, "_processor", lambda: "flags : avx512_bf16 amx_bf16")
    assert "AMX" in native_library.missing_requirement()
    monkeypatch.setattr(native_library, "_processor", lambda: "flags : avx512_bf16")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "gcc" in native_library.missing_requirement()
    monkeypatch.setattr(native_library, "_processor", lambda: "flags : avx2 fma")
    assert "gcc" in native_library.missing_requirement()


def test_which_processors_multiply_in_fp32(monkeypatch):
    intel, amd = "vendor_id : GenuineIntel\nflags : avx512_bf16", "vendor_id : AuthenticAMD\nflags : avx512_bf16"
    laptop, decided = "vendor_id : GenuineIntel\nflags : avx2 fma", {}
    for processor in (intel, amd, f"{intel} avx512_fp16", f"{amd} avx512_fp16", laptop):
        monkeypatch.setattr(native_library, "_processor", lambda processor=processor: processor)
        decided[processor] = native_library.multiplies_in_fp32.__wrapped__()
    assert [*decided.values()] == [False, False, True, False, True]


@needs_library
@pytest.mark.parametrize("fp32_products", [False, True])
@pytest.mark.parametrize("inputs", [32, 256, 288, 608])
def test_both_ways_of_multiplication(fp32_products, inputs, monkeypatch):
    native_library.native_library()  # loads the OpenMP library
    library = ctypes.CDLL(str(native_library.compile_library(fp32_products)))
    monkeypatch.setattr(native_library, "native_library", lambda: (library, ""))
    W, A, B = (torch.randn(shape).bfloat16() for shape in ((96, inputs), (6, inputs), (96, 6)))
    packed = [native_library.pack_panels(matrix) for matrix in (W, A, B)]
    whole = None
    for rows in (40, 12, 5, 1):
        x = torch.linspace(-3, 3, 40 * inputs).sin().bfloat16().view(40, inputs)[:rows]
        y, t = native_library.panel_product(x, packed[0], (packed[1], packed[2]))
        exact = x.double() @ W.double().T + t[:, :6].double() @ B.double().T
        assert ((y - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()
        whole = y if whole is None else whole
        assert torch.equal(y, whole[:rows])  # a row does not depend on the others
        if fp32_products:
            z = native_library.transposed_linear(y, W, t[:, :6], A)
            exact = y.double() @ W.double() + t[:, :6].double() @ A.double()
            assert ((z - exact).abs() <= 2**-8 * exact.abs() + 1e-4 * exact.abs().max()).all()


@needs_library
def test_an_error_of_gcc_is_the_reason(monkeypatch, tmp_path):
    (tmp_path / "decoder.c").write_text("int forward(")
    monkeypatch.setenv("ART_NB_CACHE", str(tmp_path))
    monkeypatch.setattr(native_library, "NATIVE_SOURCES", tmp_path)
    with pytest.raises(OSError, match="gcc could not compile art_nb's kernels"):
        native_library.compile_library()
    assert not [*(tmp_path / "compiled").iterdir()]


@needs_library
def test_the_gradients_of_a_layer_are_as_close_to_fp32_as_pytorchs(monkeypatch):
    torch.manual_seed(0)
    shapes = ((256, 96), (128, 96))  # of two layers with the same input
    W, x, dy = torch.randn(384, 96) / 10, torch.randn(50, 96), torch.randn(50, 384)
    masters = [t.requires_grad_() for out, n in shapes for t in (torch.randn(8, n) / 10, torch.randn(out, 8) / 10)]

    def results(dtype):
        low_rank = LowRankProduct([*zip(masters[::2], masters[1::2])], scale=2.0, dtype=dtype)
        inputs = x.bfloat16().to(dtype).requires_grad_()
        y = lora_product(inputs, FrozenWeight(W.bfloat16().to(dtype)), low_rank, masters)
        return y, *torch.autograd.grad(y, [inputs, *masters], dy.bfloat16().to(dtype))

    ours, exact = results(torch.bfloat16), results(torch.float32)
    monkeypatch.setattr("art_nb.policy.kernels.has_panels", lambda weight: False)
    for a, b, c in zip(ours, results(torch.bfloat16), exact, strict=True):
        assert (a.float() - c).norm() < 1.1 * (b.float() - c).norm() < 0.01 * c.norm()


@needs_library
def test_the_head_computes_in_fp32():
    torch.manual_seed(0)
    W, h, targets = torch.randn(VOCABULARY, 64).bfloat16(), torch.randn(9, 64).bfloat16(), torch.arange(9)
    results, exact = [], []
    for found, dtype in ((results, torch.bfloat16), (exact, torch.float32)):
        hidden = h.to(dtype).requires_grad_()
        found += token_logprobs(hidden, FrozenWeight(W.to(dtype)), targets, 0.8, chunk=4)
        found += [torch.autograd.grad(value.sum(), hidden, retain_graph=True)[0] for value in tuple(found)]
    for a, b in zip(results, exact, strict=True):
        assert torch.allclose(a.double(), b.double(), atol=1e-5 if a.dtype == torch.float32 else 2e-2, rtol=1e-2)


@needs_library
def test_learner_and_sampler_agree():
    policy, _, _ = policies_of("llama")
    tokens = torch.randint(0, VOCABULARY, (80,))
    sampled, _ = logprobs_of(
        policy,
        torch.zeros(3, 2, 1, 2, 128, 32).bfloat16(),
        tokens,
        torch.arange(80),
        torch.zeros(80).long(),
        [80],
        None,
    )
    sampled = sampled[:-1].gather(-1, tokens[1:, None])[:, 0]
    learned = sequence_logprobs(policy, tokens.tolist())
    with modules_only(policy):
        assert torch.equal(learned, sequence_logprobs(policy, tokens.tolist()))
    assert (sampled - learned).abs().mean() < 0.02 and math.isfinite(float(sampled.sum()))


@needs_library
def test_a_window_can_change_after_the_first_pass():
    (policy, _, _), inputs = policies_of("gemma3_text"), one_token(60, 2, 32)
    before, _ = logprobs_of(policy, *inputs)
    for layer in policy.model.model.layers:
        layer.self_attn.sliding_window = layer.self_attn.sliding_window and 2
    changed, _ = logprobs_of(policy, *inputs)
    assert (changed - before).abs().max() > 0.01
    policy._native.drop_packed()
    assert torch.equal(logprobs_of(policy, *inputs)[0], changed)


def tree_of(kind):
    """Segments of a prefix tree, and the window."""
    if kind == "rows":
        return [
            Segment(0, 45, torch.arange(0)),
            Segment(45, 46, torch.arange(0)),
            Segment(46, 99, torch.arange(0)),
        ], None
    stem, branch = torch.arange(40), torch.cat([torch.arange(40), torch.arange(57, 90)])
    return [
        Segment(0, 40, stem[:0]), Segment(40, 57, stem), Segment(57, 90, stem), Segment(90, 99, branch)
    ], None if kind == "tree" else 21  # fmt: skip


@needs_library
@pytest.mark.parametrize("kind", ["rows", "tree", "window"])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (12, 1), (10, 2), (7, 1)], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_attention_of_a_tree_is_as_close_to_fp32_as_pytorchs(kind, heads, threads):
    torch.manual_seed(0)
    segments, window = tree_of(kind)
    q, k, v, dout = (torch.randn(99, n, 64).bfloat16() for n in (heads[0], heads[1], heads[1], heads[0]))
    before = torch.get_num_threads()

    def results(attention, dtype):
        inputs = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out = attention(segments, q.device)(*inputs, 0.3, window)
        return out, *torch.autograd.grad(out, inputs, dout.to(dtype))

    torch.set_num_threads(threads)
    try:
        ours, again = results(native_attention, torch.bfloat16), results(native_attention, torch.bfloat16)
    finally:
        torch.set_num_threads(before)
    pytorch, exact = results(padded_attention, torch.bfloat16), results(padded_attention, torch.float32)
    for a, b, c, d in zip(ours, pytorch, exact, again, strict=True):
        assert (a.float() - c).norm() < 1.2 * (b.float() - c).norm() < 0.05 * c.norm()
        assert torch.equal(a, d)


@needs_library
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradients_of_a_model_are_as_close_to_fp32_as_pytorchs(family, monkeypatch):
    policy, exact, _ = policies_of(family)
    tokens, segments = torch.randint(0, VOCABULARY, (99,)), tree_of("tree")[0]
    positions = torch.cat([torch.arange(len(s.before), len(s.before) + s.stop - s.start) for s in segments])

    def gradients(policy):
        hidden = policy.hidden(tokens, positions, tree_attention(segments))
        logprobs, entropies = policy.scores(hidden[:-1], tokens[1:])
        return torch.cat([g.flatten() for g in torch.autograd.grad((logprobs + entropies).sum(), policy.parameters())])

    ours, expected = gradients(policy), gradients(exact)
    use_pytorch(monkeypatch, policy)
    assert (ours - expected).norm() < 1.1 * (gradients(policy) - expected).norm() < 0.2 * expected.norm()


@needs_library
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_prompt_gives_the_same_bits_with_and_without_a_cached_prefix(family):
    policy, _, _ = policies_of(family)
    tokens, positions = torch.randint(0, VOCABULARY, (90,)), torch.arange(90)

    def hidden(*ends):
        slots = KVSlots(policy.model.config, policy.dtype, policy.device, 1 << 24)
        assert slots.room(1, 96)
        with torch.inference_mode():
            parts = [slice(start, end) for start, end in zip((0, *ends), ends)]
            return torch.cat(
                [
                    policy.hidden(
                        tokens[p], positions[p], slots.attention(0 * tokens[p], positions[p], [p.stop - p.start])
                    )
                    for p in parts
                ]
            )

    whole = hidden(90)
    for ends in ((16, 90), (32, 88, 90), (45, 47, 90)):
        assert torch.equal(hidden(*ends), whole)
