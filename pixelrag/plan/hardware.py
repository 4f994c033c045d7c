"""What accelerators can do: memory, arithmetic and links, from their makers' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from pixelrag.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator.

    Attributes:
        name: as in `DEVICES`.
        memory: bytes.
        bf16, fp32: dense operations a second; fp32 without TF32.
        bandwidth: of its memory, bytes a second.
        link: to others of its node, bytes a second in each direction.
        source: where the figures are from.
    """

    name: str
    memory: float
    bf16: float
    fp32: float
    bandwidth: float
    link: float
    source: str

    def peak(self, precision: str) -> float:
        """Operations a second in a precision of `engine.precision`."""
        return self.bf16 if precision == "bf16" else self.fp32


_GB, _TB, _T = 1e9, 1e12, 1e12

DEVICES = {
    device.name: device
    for device in (
        Device("b200", 180 * _GB, 2250 * _T, 75 * _T, 7.7 * _TB, 900 * _GB, "NVIDIA DGX B200"),
        Device("h200", 141 * _GB, 989 * _T, 67 * _T, 4.8 * _TB, 450 * _GB, "NVIDIA H200 SXM"),
        Device("h100", 80 * _GB, 989 * _T, 67 * _T, 3.35 * _TB, 450 * _GB, "NVIDIA H100 SXM"),
        Device("a100", 80 * _GB, 312 * _T, 19.5 * _T, 2.039 * _TB, 300 * _GB, "NVIDIA A100 SXM"),
        Device("l40s", 48 * _GB, 362 * _T, 91.6 * _T, 864 * _GB, 32 * _GB, "NVIDIA L40S, PCIe 4"),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices on equal nodes.

    Attributes:
        device: of every rank.
        nodes, devices_per_node: how many.
        network: between nodes, bytes a second for each device in each direction.
        link: the same within a node; None = the device's.
    """

    device: Device
    nodes: int
    devices_per_node: int
    network: float
    link: float | None = None

    @property
    def world_size(self) -> int:
        """Ranks: one a device."""
        return self.nodes * self.devices_per_node

    @property
    def slowest_link(self) -> float:
        """Bytes a second over which a ring through all ranks goes at its slowest."""
        link = self.link or self.device.link
        return link if self.nodes == 1 else min(self.network, link)


def device_named(name: str) -> Device:
    """The device of that name.

    Raises:
        ConfigError: it is not known.
    """
    try:
        return DEVICES[name.lower()]
    except KeyError:
        raise ConfigError(f"--device: got {name!r}, expected one of {', '.join(DEVICES)}") from None
