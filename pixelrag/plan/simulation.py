"""Runs a job's own code on tensors that have a shape and no content.

Floating-point tensors are PyTorch's fake ones: every operation costs its shapes' arithmetic and no
memory. Integers are real, since they decide what the code does: lengths, positions, what ranks
agree on. A number that is read out of a fake tensor is 1 (a loss, a norm), True (whether it is
finite) or 0 (an integer, such as a count of faults).

Counted on the way: bytes of all storages alive and their peak, by what they are for, and
floating-point operations. The simulated device is a CPU, whose attention saves what a flash
kernel saves, and whose autocast list decides the types under `precision: bf16`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from pixelrag.plan.memory import ACTIVATIONS, BACKWARD, LOGITS, TEMPORARY, Memory

_aten = torch.ops.aten
_FACTORIES = frozenset(
    (_aten.empty, _aten.empty_strided, _aten.zeros, _aten.ones, _aten.full, _aten.rand, _aten.randn)
)
_INDEXED = frozenset((_aten.index, _aten.index_put, _aten.index_put_))
_READ = {torch.bool: True}
_DEVICE_OF = torch.ops.prim.device.default
_TESTS_FOR_FAULTS = frozenset((_aten.isnan, _aten.isinf))


def _attention(query, key, value, dropout_p=0.0, is_causal=False, **_: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape) // (2 if is_causal else 1)


def _attention_backward(
    grad, query, key, value, out, logsumexp, dropout_p, is_causal, **_: Any
) -> int:
    count = sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)
    return count // (2 if is_causal else 1)


# PyTorch does not count the CPU's; of a causal square a flash kernel computes half.
_FLOPS = dict(flop_registry) | {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class Simulation(TorchDispatchMode):
    """The mode; see the module.

    Attributes:
        memory: what lives.
        fake: the mode to build models in.
        flops: floating-point operations; a multiplication and an addition are two.
        touched: bytes that operations have read and written.
        launches: operations that compute something, roughly a kernel each.
        vocab_sizes: a tensor whose last dimension is one of these holds logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.vocab_sizes: frozenset[int] = frozenset()
        self.launches = 0
        self.memory = Memory()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.flops = self.touched = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[Simulation]:
        """Simulate what runs inside."""
        resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            self.memory.resized(storage)
            return result

        replaced = mock.patch.object(torch.UntypedStorage, "resize_", watched)
        with replaced, warnings.catch_warnings(), self:
            # DeepSpeed looks at the alignment of addresses, which are none.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTen")
            yield self

    def counted(self) -> tuple[int, int, int]:
        """So far: `flops`, `touched` and `launches`."""
        return self.flops, self.touched, self.launches

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # half of all calls
        if DTensor in types:
            return NotImplemented  # what it makes of the operation comes back here
        if func.overloadpacket not in _FLOPS and func._can_decompose():
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        is_fake = any(isinstance(t, FakeTensor) for t in tensors)
        if is_fake and func is _aten._local_scalar_dense.default:
            return _READ.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 0)
        if is_fake and func.overloadpacket in _TESTS_FOR_FAULTS:
            return torch.zeros(args[0].shape, dtype=torch.bool)
        if not is_fake and not tensors and func.overloadpacket in _FACTORIES:
            is_fake = _makes_floats(func, args, kwargs)
        if is_fake and func.overloadpacket in _INDEXED:
            args = args[0], _positions(args[1]), *args[2:]
        with self.fake if is_fake else contextlib.nullcontext():
            result = func(*args, **kwargs)
        if is_fake and self._is_figure(func, tensors, result):
            return torch.ones(result.shape, dtype=result.dtype)
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor) and leaf.fake_device.type != "meta":
                self.memory.add(leaf, self._use_of_new(leaf))
        if is_fake:
            self._count(func, tensors, result)
            if (count := _FLOPS.get(func.overloadpacket)) is not None:
                self.flops += count(*args, **kwargs, out_val=result)
        return result

    def _is_figure(self, func: Any, tensors: list[torch.Tensor], result: Any) -> bool:
        """A lone number that nothing is derived from: a norm, of which decisions depend."""
        return (
            isinstance(result, FakeTensor)
            and result.dim() == 0
            and result.is_floating_point()
            and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
            and torch._C._current_graph_task_id() == -1
            and not func._schema.is_mutable
            and not any(r.alias_info for r in func._schema.returns)
        )

    def _use_of_new(self, tensor: FakeTensor) -> str:
        if tensor.dim() > 1 and tensor.shape[-1] in self.vocab_sizes:
            return LOGITS
        if torch._C._current_graph_task_id() != -1:
            return BACKWARD
        return ACTIVATIONS if torch.is_grad_enabled() else TEMPORARY

    def _count(self, func: Any, tensors: list[torch.Tensor], result: Any) -> None:
        """An operation, and the bytes that it reads and writes; a view touches none."""
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        given = {_storage(t)._cdata for t in tensors}
        in_place = func._schema.is_mutable
        if made and (in_place or not all(_storage(t)._cdata in given for t in made)):
            self.touched += sum(t.numel() * t.element_size() for t in (*tensors, *made))
            self.launches += 1


def _positions(indices: Any) -> list[torch.Tensor | None]:
    """Real masks as the places that they mark: how many there are decides a shape."""
    places: list[torch.Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype == torch.bool
        places += index.nonzero().unbind(1) if is_mask else [index]
    return places


def _makes_floats(func: Any, args: Any, kwargs: Any) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is None and func.overloadpacket is _aten.full:
        return isinstance(args[1], float)
    return (dtype or torch.get_default_dtype()).is_floating_point


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()
