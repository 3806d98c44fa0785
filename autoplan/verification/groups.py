"""Which devices take part in a collective, in all of XLA's notations, and the mesh axes that those are.

Devices are numbered as partitions, which is row-major over the mesh's axes.
"""

from __future__ import annotations

import math
import re

import numpy as np

_LISTS = re.compile(r"replica_groups=\{(\{[0-9,{} ]*\})?\}")
_IOTA = re.compile(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, *device_ids=\(((?:[^()]|\([^()]*\))*)\))?\s*\{([^}]*)\}")
_IDS = re.compile(r"\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{([0-9,{} ]*)\}")


def replica_groups(attributes: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups of devices that a collective's attributes name; one of all devices if they name none.

    >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    """
    if found := _MESH.search(attributes):
        return _mesh_groups(found[1], found[2], found[3])
    if found := _IOTA.search(attributes):
        devices = np.arange(math.prod(_integers(found[2]))).reshape(_integers(found[2]))
        if found[3]:
            devices = devices.transpose(_integers(found[3]))
        return _rows(devices.reshape(_integers(found[1])))
    if (found := _LISTS.search(attributes)) and found[1]:
        return tuple(tuple(_integers(group)) for group in re.findall(r"\{([0-9, ]+)\}", found[1]))
    if "replica_groups=" in attributes and "replica_groups={}" not in attributes:
        raise ValueError(f"replica groups in an unknown notation: {attributes[:160]}")
    return (tuple(range(num_devices)),)


def source_target_pairs(attributes: str) -> tuple[tuple[int, int], ...]:
    """The (source, target) devices of a collective-permute."""
    found = _PAIRS.search(attributes)
    pairs = re.findall(r"\{(\d+), ?(\d+)\}", found[1]) if found else []
    return tuple((int(source), int(target)) for source, target in pairs)


def varying_axes(devices: tuple[int, ...], sizes: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices differ, major first.

    >>> varying_axes((0, 2), {"x": 2, "y": 2})
    ('x',)
    """
    if not devices or not sizes:
        return ()
    places = np.unravel_index(np.asarray(devices), tuple(sizes.values()))
    return tuple(axis for axis, place in zip(sizes, places, strict=True) if np.ptp(place))


def _mesh_groups(axes: str, device_ids: str | None, used: str) -> tuple[tuple[int, ...], ...]:
    """Groups by axes of a mesh: `mesh['x'=4,'y'=2] {'y'}`; `'x':(2)2` is the part of an axis of 4 that has 2 devices
    before it (major) and 2 in it."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    parts: dict[str, list[int]] = {name: [size] for name, size in sizes.items()}
    chosen: list[tuple[str, int]] = []
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", used):
        if size:
            rest = sizes[name] // (int(before) * int(size))
            parts[name] = [int(before), int(size), rest]
        chosen.append((name, 1 if size else 0))
    places = [(name, part) for name, split in parts.items() for part in range(len(split))]
    shape = [size for split in parts.values() for size in split]
    ids = _device_ids(device_ids) if device_ids else np.arange(math.prod(shape))
    inside = [places.index(place) for place in chosen]
    outside = [i for i in range(len(places)) if i not in inside]
    count = math.prod(shape[i] for i in inside)
    return _rows(ids.reshape(shape).transpose(outside + inside).reshape(-1, count))


def _device_ids(text: str) -> np.ndarray:
    """The devices of a mesh, row-major: a list, or `[2,4]T(1,0)`, which is iota reshaped and transposed."""
    found = _IDS.match(text)
    if not found:
        return np.asarray(_integers(text))
    ids = np.arange(math.prod(_integers(found[1]))).reshape(_integers(found[1]))
    return (ids.transpose(_integers(found[2])) if found[2] else ids).reshape(-1)


def _rows(devices: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(device) for device in row) for row in devices)


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
