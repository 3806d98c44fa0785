"""Compiles an exported step for devices that are not there; run by `ahead` as `python -m autoplan.verification.child`.

A process of its own because platforms, flags and device counts are fixed once JAX has started, because XLA's dumps
are asked for by an environment variable, and because it can be stopped when it has dumped what is needed.

Takes a folder with `request.json` and `step.bin`, writes `compiled.txt` and `memory.json` there when done.
"""

from __future__ import annotations

import json
from pathlib import Path
import sys
from typing import Any

import jax
from jax.experimental import topologies
import jax.export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    names = tuple(request["axis_names"])
    devices = np.empty(len(found := _devices(request)), dtype=object)
    devices[:] = found
    mesh = Mesh(devices.reshape(request["axis_sizes"]), names, axis_types=(AxisType.Auto,) * len(names))
    exported = jax.export.deserialize(bytearray((folder / "step.bin").read_bytes()))
    in_shardings = [NamedSharding(mesh, _spec(spec)) for spec in request["in_specs"]]

    def autoplan_step(*leaves: Any) -> Any:
        return exported.call(*leaves)

    jitted = jax.jit(
        autoplan_step,
        in_shardings=in_shardings,
        out_shardings=[NamedSharding(mesh, _spec(spec)) for spec in request["out_specs"]],
        donate_argnums=tuple(request["donated"]),
    )
    avals = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, in_shardings, strict=True)
    ]
    compiled = jitted.lower(*avals).compile(compiler_options=request["compiler_options"])
    memory = compiled.memory_analysis()
    sizes = {
        name: getattr(memory, f"{name}_size_in_bytes", 0) for name in ("argument", "output", "alias", "temp")
    }
    (folder / "memory.json").write_text(json.dumps(sizes))
    (folder / "compiled.part").write_text(compiled.as_text())
    (folder / "compiled.part").rename(folder / "compiled.txt")


def _devices(request: dict[str, Any]) -> list[Any]:
    """The devices in the order in which mesh axes run over them: of TPUs, row-major over the torus."""
    if request["platform"] == "cpu":
        return jax.devices("cpu")[: int(np.prod(request["axis_sizes"]))]
    options = dict(request["topology_options"])
    devices = topologies.get_topology_desc(request["topology"], platform=request["platform"], **options).devices
    if request["platform"] != "tpu":
        return list(devices)
    return sorted(devices, key=lambda d: (getattr(d, "slice_index", 0) or 0, *d.coords, getattr(d, "core_on_chip", 0)))


def _spec(entries: list[list[str]]) -> PartitionSpec:
    return PartitionSpec(*(tuple(axes) if axes else None for axes in entries))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
