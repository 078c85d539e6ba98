"""Devices that compute on the CPU and behave like GPUs: they refuse mixed devices and count synchronizations.

`install()` registers the device type `fakegpu` with PyTorch. It changes functions of torch for the whole process, so it
must be called before art_nb is imported, and only in a process of its own. The tests in tests/rehearsal do this.

There are two devices: `fakegpu:0` and `fakegpu:1`. As on a GPU, a name without an index is the current device of the
thread. PyTorch's autograd engine knows only the first device of a backend that is written in Python. Therefore, only
`fakegpu:0` can compute gradients.
"""

import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.attention.varlen  # registers the operations of `EMULATED`
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

NAME = "fakegpu"
COUNT = 2  # devices
LIBRARY = str(Path(__file__).parents[2] / "art_nb") + "/"
WAITS: Counter[str] = Counter()  # host synchronizations, by "file:line" of art_nb
PASSES: Counter[str] = Counter()  # calls of the device's operations, by operation
make_tensor, view_as_tensor = torch.tensor, torch.as_tensor  # torch's own functions, which `install` replaces
_installed: list[torch.library.Library] = []
_thread = threading.local()

aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default, aten._local_scalar_dense.default}  # may see two devices
INDEXING = {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default}
INDEXING.add(aten._index_put_impl_.default)
DATA_DEPENDENT = {  # the size or the Python value of the result depends on numbers that are on the device
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}


def current_device() -> int:
    """Return the index of the device that this thread uses for names without an index."""
    return getattr(_thread, "index", 0)


def set_device(device) -> None:
    """Set the current device of this thread."""
    device = torch.device(NAME, device) if isinstance(device, int) else torch.device(device)
    _thread.index = index_of(device)


def index_of(device: torch.device) -> int:
    """Return the index of a device. Raise `RuntimeError` if there is no such device."""
    index = current_device() if device.index is None else device.index
    if index >= COUNT:
        raise RuntimeError(f"invalid device ordinal: {device} of {COUNT} devices")
    return index


class FakeGPUTensor(torch.Tensor):
    """A tensor of a device. `values` is the CPU tensor with its contents."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, index: int = 0):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device(NAME, index),
        )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return execute(func, args, kwargs or {})

    def __getitem__(self, index):
        return super().__getitem__(index_tensors(index))

    def __setitem__(self, index, value):
        super().__setitem__(index_tensors(index), value)

    def new_tensor(self, data, *, dtype=None, **options):
        """Return a tensor on this device. The C++ function would bypass Python."""
        return tensor(data, dtype=dtype or self.dtype, device=self.device, **options)

    @property
    def data(self):
        """The tensor without its history."""
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other):
        torch.Tensor.data.__set__(self, other)
        self.values = other.values

    def data_ptr(self):
        """Return the address of the contents. The wrapper has none."""
        return self.values.data_ptr()

    def untyped_storage(self):
        """Return the storage of the contents."""
        return self.values.untyped_storage()

    def tolist(self):
        """Return the numbers, after a synchronization."""
        WAITS[caller()] += 1
        return self.values.tolist()

    def __repr__(self):
        return f"FakeGPUTensor({self.values!r})"


def index_tensors(index):
    """Return an index whose lists are tensors. For lists, C++ would create tensors on the device, past Python."""
    as_tensor = lambda part: make_tensor(part) if isinstance(part, list) else part
    return tuple(map(as_tensor, index)) if isinstance(index, tuple) else as_tensor(index)


def caller() -> str:
    """Return "file:line" of the innermost running function of art_nb."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(LIBRARY):
            return f"{frame.f_code.co_filename.removeprefix(LIBRARY)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def on_device(value) -> bool:
    """Return whether a value is a tensor of one of the devices."""
    return isinstance(value, FakeGPUTensor)


def foreign(tensors, here: torch.device) -> list[torch.Tensor]:
    """Return the tensors that kernels of `here` cannot read. They can read single numbers of the CPU."""
    return [t for t in tensors if (t.device != here if on_device(t) else t.dim())]


def check_devices(func, args, tensors) -> None:
    """Raise `RuntimeError` if a GPU would refuse the devices of an operation."""
    if func in COPIES or not any(map(on_device, tensors)):
        return
    here = next(t.device for t in tensors if on_device(t))
    strangers = foreign(tensors, here)
    if func in INDEXING and on_device(args[0]):  # CPU indices into a tensor of the device are permitted
        indices = [t for t in args[1] if on_device(t)]
        strangers = foreign([*indices, *(t for t in args[2:3] if isinstance(t, torch.Tensor))], here)
    if strangers:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{here} and {strangers[0].device}! ({func} called by {caller()}, "
            f"shapes {[tuple(t.shape) for t in tensors]})"
        )


def waits(func, args, target) -> bool:
    """Return whether the host waits for the device in this operation."""
    if func is aten._to_copy.default:
        return on_device(args[0]) and target is not None and target.type == "cpu"
    if func is aten.copy_.default:
        return on_device(args[1]) and not on_device(args[0])
    if func in INDEXING:
        masks = [t for t in args[1] if on_device(t) and t.dtype in (torch.bool, torch.uint8)]
        return bool(masks)
    return func in DATA_DEPENDENT


def visible(queries: int, keys: int, causal: bool, window) -> torch.Tensor:
    """Return which keys a query of a segment sees, for segments that end together, as FlashAttention aligns them."""
    left, right = (keys if size < 0 else size for size in window or (-1, -1))
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return (distance <= left) & (distance >= (0 if causal else -right))


def segments(query, key, value, cu_q, cu_k, causal, scale, window):
    """Yield the slices, the fp32 values, the masked scores and the scale of each segment of a packed batch."""
    if query.dtype not in (torch.float16, torch.bfloat16) or query.shape[2] > 256:
        raise RuntimeError("FlashAttention only supports fp16 and bf16, and head dimensions up to 256.")
    if cu_q.dtype != torch.int32 or cu_k.dtype != torch.int32:
        raise RuntimeError("FlashAttention needs cumulative lengths of the dtype int32.")
    heads, scale = query.shape[1] // key.shape[1], query.shape[2] ** -0.5 if scale is None else scale
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        q = query[a:b].float().transpose(0, 1)
        k, v = (t[c:d].float().transpose(0, 1).repeat_interleave(heads, 0) for t in (key, value))
        hidden = ~visible(int(b - a), int(d - c), causal, window)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
        yield slice(a, b), slice(c, d), q, k, v, scores, scale


def varlen_forward(
    query, key, value, cu_q, cu_k, max_q, max_k, causal=False, scale=None, window=None, gqa=False, *rest
):
    """Compute what PyTorch's variable-length attention computes on a GPU."""
    out, lse = torch.empty_like(query), torch.empty(query.shape[1], len(query))
    for here, _, _, _, v, scores, _ in segments(query, key, value, cu_q, cu_k, causal, scale, window):
        out[here] = (scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype)
        lse[:, here] = scores.logsumexp(-1)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def varlen_backward(
    grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, causal, rng_state, scale=None, window=None, *rest
):
    """Compute the gradients of `varlen_forward`."""
    dq, dk, dv = torch.zeros_like(query), torch.zeros(key.shape), torch.zeros(value.shape)
    heads = query.shape[1] // key.shape[1]
    for here, there, q, k, v, scores, factor in segments(query, key, value, cu_q, cu_k, causal, scale, window):
        p, dout = scores.softmax(-1), grad[here].float().transpose(0, 1)
        dp = dout @ v.transpose(1, 2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * factor
        dq[here] = (ds @ k).transpose(0, 1).to(query.dtype)
        for total, part in ((dk, ds.transpose(1, 2) @ q), (dv, p.transpose(1, 2) @ dout)):
            total[there] += part.unflatten(0, (-1, heads)).sum(1).transpose(0, 1)
    return dq, dk.to(key.dtype), dv.to(value.dtype)


def wide_mm(a, b, dtype):
    """Multiply matrices in half precision and return the fp32 sums, as cuBLAS does."""
    if dtype != torch.float32 or a.dtype != b.dtype or a.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("out_dtype must be float32, and both matrices in float16 or both in bfloat16.")
    return a.float() @ b.float()


EMULATED = {  # kernels that exist only for GPUs
    torch.ops.aten.mm.dtype: wide_mm,
    torch.ops.torch_attn._varlen_attn.default: varlen_forward,
    torch.ops.torch_attn._varlen_attn_backward.default: varlen_backward,
}


def execute(func, args, kwargs):
    """Run an operation on the CPU. Return tensors of the device on which it would have run."""
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    here = [t for t in tensors if on_device(t)]
    target = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    check_devices(func, args, tensors)
    if here and waits(func, args, target):
        WAITS[caller()] += 1
    PASSES[func._schema.name.removeprefix("aten::")] += 1
    plain = [leaf.values if on_device(leaf) else leaf for leaf in leaves]
    plain_args, plain_kwargs = tree_unflatten(plain, spec)
    plain_kwargs |= {} if target is None else {"device": "cpu"}
    if "pin_memory" in plain_kwargs:
        plain_kwargs["pin_memory"] = False
    result = EMULATED.get(func, func)(*plain_args, **plain_kwargs)
    if func is aten.copy_.default:
        return args[0]
    if (target.type != NAME) if target is not None else not here:
        return result
    if func is aten._to_copy.default and result is plain_args[0]:
        result = result.clone()  # from another device is always a copy
    index = here[0].device.index if target is None else index_of(target)
    wrappers = {id(t.values): t for t in here if t.device.index == index}  # an in-place operation returns its argument
    wrap = lambda t: wrappers[id(t)] if id(t) in wrappers else FakeGPUTensor(t, index)
    return tree_map_only(torch.Tensor, wrap, result)


def tensor(data, *, device=None, **options):
    """Do the same as `torch.tensor`, which only knows devices that are written in C++."""
    if device is None or torch.device(device).type != NAME:
        return make_tensor(data, device=device, **options)
    requires_grad = options.pop("requires_grad", False)
    return make_tensor(data, **options).to(device).requires_grad_(requires_grad)


def as_tensor(data, *, device=None, **options):
    """Do the same as `torch.as_tensor`."""
    if isinstance(data, torch.Tensor) or device is None or torch.device(device).type != NAME:
        return view_as_tensor(data, device=device, **options)
    return tensor(data, device=device, **options)


class NoGrad(torch.no_grad):
    """A replacement of `torch.inference_mode`, in which tensors of Python subclasses do not work."""

    def __new__(cls, mode=True):
        return super().__new__(cls)

    def __init__(self, mode=True):
        super().__init__()


def install() -> None:
    """Register the devices with PyTorch and replace the functions that would bypass Python."""
    if _installed:
        return
    if "art_nb.policy.loading" in sys.modules:
        raise RuntimeError("The fake GPU must be installed before art_nb is imported: run `make rehearse`.")
    from torch.utils._device import _device_constructors
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

    module = _DummyBackendModule()
    vars(module).update(current_device=current_device, set_device=set_device, device_count=lambda: COUNT)
    _setup_privateuseone_for_python_backend(NAME, module)
    # Activation checkpointing restores the autocast state in the backward pass, so torch asks for these dtypes.
    getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: execute(func, args, kwargs), "PrivateUse1")
    # A GPU has a kernel for it. Without one, PyTorch computes it with several operations and temporary tensors.
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("silu_backward", lambda *args: execute(aten.silu_backward.default, args, {}), "PrivateUse1")
    _installed.extend([library, kernels])
    _device_constructors()  # torch caches its own functions here, which `torch.device` as a context replaces
    torch.tensor, torch.as_tensor, torch.inference_mode = tensor, as_tensor, NoGrad


@contextmanager
def counted_waits():
    """Yield a Counter that holds the synchronizations of the block when it ends, by "file:line"."""
    before, found = WAITS.copy(), Counter()
    yield found
    found.update(WAITS - before)
