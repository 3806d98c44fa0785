"""Measures the simulated CPU mesh: the source of the constants in `autoplan.cost_models.cpu`.

    python tests/cost_models/measure_cpu.py --devices 8 --json cpu8.json

Prints (and writes) medians over repetitions, in seconds per operation and per simulated device, with every
simulated device busy at once: matmuls, elementwise passes, dispatch, and each collective over groups of
2, 4, ..., N devices (all groups of the mesh at work together). Operations run in a dependent chain inside one
program, so the dispatch of the program is shared by the whole chain and is measured on its own.
"""

import argparse
import json
import os
import statistics
import time


def measure(function, argument, chain: int, repeats: int) -> dict[str, float]:
    """Median, least, and relative spread (interquartile range / median) of the seconds per chain element."""
    function(argument).block_until_ready()
    function(argument).block_until_ready()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function(argument).block_until_ready()
        times.append((time.perf_counter() - start) / chain)
    low, median, high = statistics.quantiles(times, n=4)
    return {"time_s": median, "least_s": min(times), "spread": (high - low) / median}


def show(times: dict[str, float]) -> str:
    return f"{times['time_s'] * 1e6:10.1f} us +-{times['spread']:4.0%} (least {times['least_s'] * 1e6:.1f})"


def collective_body(kind: str, size: int, chain: int):
    """A per-device function that runs `chain` dependent collectives of `kind` over the axis 'group'."""
    from jax import lax

    def step(x):
        if kind == "all-reduce":
            return lax.psum(x, "group")
        if kind == "all-gather":  # x is one piece; keep a piece so that the chain goes on
            return lax.optimization_barrier(lax.all_gather(x, "group", tiled=True))[: x.shape[0]]
        if kind == "reduce-scatter":  # x is one piece of what is reduced; widen it as cheaply as possible
            wide = lax.optimization_barrier(lax.pad(x, 0.0, [(0, x.shape[0] * (size - 1), 0)]))
            return lax.psum_scatter(wide, "group", tiled=True)
        if kind == "pad":  # the overhead of the widening above
            return lax.optimization_barrier(lax.pad(x, 0.0, [(0, x.shape[0] * (size - 1), 0)]))[: x.shape[0]]
        if kind == "all-to-all":
            return lax.all_to_all(x, "group", 0, 0, tiled=True)
        return lax.ppermute(x, "group", [(i, (i + 1) % size) for i in range(size)])

    def body(x):
        for _ in range(chain):
            x = lax.optimization_barrier(step(x))
        return x

    return body


def measure_collectives(jax, count: int, repeats: int, rows: list) -> None:
    from jax.sharding import PartitionSpec as P

    devices = jax.devices()[:count]
    size = 2
    while size <= count:
        mesh = jax.make_mesh((count // size, size), ("rest", "group"), devices=devices)
        for kind in ("all-reduce", "all-gather", "reduce-scatter", "pad", "all-to-all", "collective-permute"):
            for log2 in (8, 12, 14, 16, 18, 20, 22, 24, 25):
                payload = 2**log2
                # the payload of an all-gather is its output and of a reduce-scatter its input
                local = payload // 4 // (size if kind in ("all-gather", "reduce-scatter", "pad") else 1)
                chain = 20 if payload <= 2**18 else 6
                body = collective_body(kind, size, chain)
                spec = P(("rest", "group"))
                run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
                x = jax.device_put(jax.numpy.zeros(local * count, "float32"), jax.NamedSharding(mesh, spec))
                times = measure(run, x, chain, repeats)
                rows.append(dict(what=kind, devices=count, size=size, payload_bytes=payload, **times))
                print(f"{kind:20} n={size} {payload:>10} B  {show(times)}", flush=True)
        size *= 2


def measure_compute(jax, count: int, repeats: int, rows: list) -> None:
    from jax.sharding import PartitionSpec as P

    jnp = jax.numpy
    mesh = jax.make_mesh((count,), ("d",), devices=jax.devices()[:count])
    sharding = jax.NamedSharding(mesh, P("d"))

    def run(name, body, local_shape, chain, dtype="float32", **extra):
        f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))
        x = jax.device_put(jnp.full((local_shape[0] * count, *local_shape[1:]), 1e-3, dtype), sharding)
        times = measure(f, x, chain, repeats)
        rows.append(dict(what=name, devices=count, shape=local_shape, dtype=dtype, **times, **extra))
        rates = "  ".join(f"{extra[key] / times['time_s'] / 1e9:.2f} G{key}/s a device" for key in extra)
        print(f"{name:12} {dtype:9} {local_shape!s:16} {show(times)}  {rates}", flush=True)

    def matmuls(chain):
        def body(x):
            for _ in range(chain):
                x = x @ x
            return x

        return body

    def passes(chain):
        def body(x):
            for _ in range(chain):
                x = jax.lax.optimization_barrier(x * 0.999 + 1e-6)
            return x

        return body

    run("dispatch", lambda x: x + 1, (8,), 1)
    for dtype in ("float32", "bfloat16"):
        for n in (32, 64, 128, 256, 512, 1024):
            chain = 20 if n <= 256 else 3
            run("matmul", matmuls(chain), (n, n), chain, dtype, flops=2 * n**3)
    for log2 in (6, 10, 14, 16, 18, 20, 22):
        chain = 20 if log2 <= 18 else 6
        run("elementwise", passes(chain), (2**log2,), chain, bytes=2 * 4 * 2**log2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={arguments.devices}"
    import jax

    rows: list = []
    measure_compute(jax, arguments.devices, arguments.repeats, rows)
    measure_collectives(jax, arguments.devices, arguments.repeats, rows)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"jax": jax.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
