"""Where a frozen model's weights lie: one copy to a machine, a part to a rank, or off the GPU."""

from __future__ import annotations

import bisect
import secrets
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pixelrag.distributed.collectives import agree_max, from_main
from pixelrag.distributed.env import World
from pixelrag.distributed.together import together


def share_on_node(module: nn.Module, world: World) -> None:
    """Let the ranks of a machine use one copy of a frozen module's weights on the CPU.

    Weights that stand in the model's own files in the wanted dtype are mapped from them and shared
    as it is; those that were converted (another dtype, GGUF) are written to one file, mapped by all
    ranks and unlinked, so that nothing is left behind. A collective.

    Args:
        module: on the CPU, equal on all ranks; its parameters get new storage.
        world: this process's place.
    """
    parameters = dict(module.named_parameters())  # each shared one once
    mapped = _are_mapped(parameters.values())
    if world.world_size == 1 or agree_max([int(not mapped)])[0] == 0:
        return
    path = Path(tempfile.gettempdir()) / from_main(
        lambda: f"pixelrag-{secrets.token_hex(8)}.safetensors"
    )
    with together():
        if world.local_rank == 0:
            save_file({n: p.detach().contiguous() for n, p in parameters.items()}, path)
    with together():
        shared = load_file(path)
        for name, parameter in parameters.items():
            parameter.data = shared[name]
    if world.local_rank == 0:
        path.unlink()


def _are_mapped(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all of them lie in mapped files rather than in this process's own memory."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return False
    starts, stops = [], []
    for line in maps.read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            start, _, stop = fields[0].partition("-")
            starts.append(int(start, 16))
            stops.append(int(stop, 16))
    for tensor in tensors:
        index = bisect.bisect_right(starts, tensor.data_ptr()) - 1
        if index < 0 or tensor.data_ptr() >= stops[index]:
            return False
    return True


def shard_frozen(
    body: nn.Module,
    blocks: Sequence[nn.Module],
    whole: Iterable[nn.Parameter],
    device: torch.device,
) -> None:
    """Shard a frozen module over all ranks; each block is gathered for its forward alone.

    Args:
        body: what is called; on the CPU, equal on all ranks.
        blocks: submodules that are gathered as units.
        whole: parameters that every rank keeps (the head, which the loss reads outside any
            forward), in the body or not.
        device: where parts and computation go.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    kept = set(whole)
    for parameter in kept:
        parameter.data = parameter.data.to(device)
    for unit in [*blocks, body]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=kept)
    for buffer in body.buffers():
        buffer.data = buffer.data.to(device)


def offload_blocks(module: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Keep the blocks' weights on the CPU and bring each to ``device`` for its forward alone.

    Everything outside the blocks (embedding, last norm, head) moves to ``device`` for good.

    Args:
        module: frozen, on the CPU.
        blocks: what comes and goes.
        device: where it computes.
    """
    inside = {id(p) for block in blocks for p in block.parameters()}
    for parameter in module.parameters():
        if id(parameter) not in inside:
            parameter.data = parameter.data.to(device)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)
    for block in blocks:
        _Visitor(block, device)


class _Visitor:
    """Hooks that lend a block the device for one forward."""

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self._device = device
        self._home = {parameter: parameter.data for parameter in block.parameters()}
        block.register_forward_pre_hook(self._come)
        block.register_forward_hook(self._go, always_call=True)

    def _come(self, *_: object) -> None:
        for parameter, home in self._home.items():
            parameter.data = _fetch(home, self._device)

    def _go(self, *_: object) -> None:
        for parameter, home in self._home.items():
            parameter.data = home


def _fetch(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device, non_blocking=True)
