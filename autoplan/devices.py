"""What a step is planned for, and the devices that it runs on.

The user gives a description, a `Cluster`, a `jax.sharding.Mesh`, a list of devices, or nothing. Planning
needs only the description; `run_mesh` finds the devices when there is something to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh
import numpy as np

from .compat import mesh_set_around
from .cost_models import Cluster, calibrate, cluster_of, parse_cluster
from .errors import ClusterError, DeviceError
from .plan import MeshShape
from .profiling import find_profile

ClusterLike = str | Cluster | Mesh | Sequence[jax.Device] | None


@dataclass(frozen=True)
class Target:
    """A cluster to plan for. `devices` are those that were given, if any; `mesh` is the user's, and kept."""

    cluster: Cluster
    devices: tuple[jax.Device, ...] | None = None
    mesh: Mesh | None = None

    @property
    def fixed_mesh(self) -> MeshShape | None:
        """Names and sizes of the user's mesh axes."""
        if self.mesh is None:
            return None
        return MeshShape(tuple(map(str, self.mesh.axis_names)), tuple(self.mesh.devices.shape))


def check_cluster(cluster: Any) -> None:
    """Refuses what is no cluster, without asking for devices.

    Raises:
      ClusterError: says what is accepted.
    """
    if isinstance(cluster, str):
        _parse(cluster)
    elif cluster is not None and not isinstance(cluster, (Cluster, Mesh)):
        _device_list(cluster)


def resolve(cluster: ClusterLike, *, profiles: bool = True) -> Target:
    """The target that a user's `cluster=` means; None is the mesh set by `jax.set_mesh`, or all of `jax.devices()`.

    What `autoplan profile` has measured on just this cluster takes the place of data sheets, unless `profiles` is
    false or the user gives a `Cluster`, which is taken as it is.

    Raises:
      ClusterError: it is no cluster, or nothing is known of the devices' kind.
    """
    if cluster is None:
        cluster = mesh_set_around()
    if isinstance(cluster, Cluster):
        return Target(cluster)
    if isinstance(cluster, str):
        target = Target(_parse(cluster))
    elif isinstance(cluster, Mesh):
        if not cluster.axis_names:
            raise ClusterError(
                "a mesh has at least one axis", got=repr(cluster), action="Give it one, of size 1 for one device"
            )
        devices = tuple(cluster.devices.flat)
        target = Target(_describe(devices), devices, cluster)
    else:
        devices = ordered_devices() if cluster is None else _device_list(cluster)
        target = Target(_describe(devices), devices)
    profile = find_profile(target.cluster) if profiles else None
    return replace(target, cluster=calibrate(target.cluster, profile)) if profile else target


def ordered_devices() -> tuple[jax.Device, ...]:
    """All of `jax.devices()`, in the order in which mesh axes run over them (the last axis over neighbours).

    TPUs: slice, then the torus's coordinates, row-major. Others: as JAX numbers them, which is host by host.
    """
    devices = tuple(jax.devices())
    if not all(hasattr(device, "coords") for device in devices):
        return devices
    return tuple(
        sorted(
            devices,
            key=lambda d: (getattr(d, "slice_index", 0) or 0, *d.coords, getattr(d, "core_on_chip", 0)),
        )
    )


def run_mesh(target: Target, shape: MeshShape) -> Mesh:
    """The devices in a plan's mesh, with automatic axes.

    Raises:
      DeviceError: there are too few devices, or the plan's mesh is not the user's.
    """
    if target.mesh is not None:
        if dict(target.fixed_mesh.items()) != dict(shape.items()):
            raise DeviceError(
                "a plan runs on the mesh that it was made for",
                got=f"a plan for ({shape}) and a mesh with ({target.fixed_mesh})",
                action="Plan again, or pass a mesh of the plan's shape as `cluster=`",
            )
        return _auto_mesh(target.mesh.devices, target.mesh.axis_names)
    devices = ordered_devices() if target.devices is None else target.devices
    if len(devices) < shape.num_devices:
        platform = devices[0].platform if devices else "no"
        raise DeviceError(
            f"the plan's mesh ({shape}) needs {shape.num_devices} devices",
            got=f"{len(devices)} {platform} device{'s' * (len(devices) != 1)}",
            action="Plan anew for the devices that are there (leave `cluster=` and `plan=` out), or simulate on CPU: "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={shape.num_devices} and JAX_PLATFORMS=cpu in "
            "the environment before jax is imported",
        )
    chosen = np.empty(shape.num_devices, dtype=object)
    chosen[:] = devices[: shape.num_devices]
    return _auto_mesh(chosen.reshape(shape.axis_sizes), shape.axis_names)


def _auto_mesh(devices: np.ndarray, names: Sequence[Any]) -> Mesh:
    return Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * len(names))


def _parse(text: str) -> Cluster:
    try:
        return parse_cluster(text)
    except ValueError as error:
        raise ClusterError(str(error)) from None


def _device_list(devices: Any) -> tuple[jax.Device, ...]:
    items = tuple(np.asarray(devices, dtype=object).flat) if isinstance(devices, Iterable) else ()
    if not items or not all(isinstance(item, jax.Device) for item in items):
        raise ClusterError(
            "a cluster is a description, a jax.sharding.Mesh, a list of devices, or None for all devices",
            got=repr(devices),
            action="Write, for instance, cluster='8xH100' or cluster=jax.devices()",
        )
    if len(set(items)) != len(items):
        raise ClusterError(
            "a cluster has each device once", got=repr(list(items)), action="Leave the repeated ones out"
        )
    return items


def _describe(devices: Sequence[jax.Device]) -> Cluster:
    kinds = {(device.device_kind, device.platform) for device in devices}
    if len(kinds) != 1:
        raise ClusterError(
            "the devices of a cluster are of one kind",
            got=str(sorted(kinds)),
            action="Pass devices of one kind as `cluster=`",
        )
    kind, platform = kinds.pop()
    hosts = len({device.process_index for device in devices})
    slices = len({getattr(device, "slice_index", 0) or 0 for device in devices})
    try:
        cluster = cluster_of(kind, platform, len(devices), hosts, slices)
    except ValueError as error:
        raise ClusterError(str(error)) from None
    assert math.prod(cluster.dims) == len(devices), (cluster, len(devices))
    return cluster
