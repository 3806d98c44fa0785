"""Trains a byte-level GPT (flax NNX, about 10M parameters) on the sources of the Python standard library.

The step is written for one device. `@autoplan.parallelize` plans it for all devices of the machine, here 8
simulated CPU devices unless you chose others (JAX_PLATFORMS or XLA_FLAGS). The script prints the plan, the
losses of the parallel and the single-device run side by side, and how long a step takes with the chosen plan
and with the three classic layouts.

    python examples/gpt.py
    python examples/gpt.py --steps 50 --json result.json
    autoplan plan examples/gpt.py:train_step --cluster v5e:4x4
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import json
import os
from pathlib import Path
import statistics
import sysconfig
import time

if not os.environ.get("JAX_PLATFORMS") and "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
    )

from flax import nnx
import jax
import numpy as np
import optax

import autoplan

VOCAB, HEADS = 256, 8
WIDTH, LAYERS, LENGTH, BATCH = 384, 6, 64, 8
CLASSIC = ("data", "fsdp", "tensor")
# Losses are means of float32 sums taken in another order, over weights that went through as many updates.
LOSS_TOLERANCE = 1e-3


class Block(nnx.Module):
    """Attention and a feed-forward layer, each after a layer norm and around a residual."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, width, use_bias=False, decode=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class GPT(nnx.Module):
    """Bytes in [batch, length], logits out [batch, length, 256]."""

    def __init__(self, width: int, layers: int, length: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, width, rngs=rngs)
        self.position = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.position(np.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model: GPT, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next byte."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@autoplan.parallelize
def train_step(model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """One AdamW step on tokens [batch, length + 1]; changes model and optimizer, returns the loss."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, grads)
    return loss


def make_state(key: jax.Array, width: int, layers: int, length: int) -> tuple[GPT, nnx.Optimizer]:
    """A new model and its optimizer."""
    model = GPT(width, layers, length, nnx.Rngs(key))
    return model, nnx.Optimizer(model, optax.adamw(3e-4, weight_decay=0.01), wrt=nnx.Param)


def example_args() -> tuple[GPT, nnx.Optimizer, jax.ShapeDtypeStruct]:
    """Arguments of `train_step` as shapes only, for the command line."""
    model, optimizer = nnx.eval_shape(lambda: make_state(jax.random.key(0), WIDTH, LAYERS, LENGTH))
    return model, optimizer, jax.ShapeDtypeStruct((BATCH, LENGTH + 1), np.int32)


def read_text() -> np.ndarray:
    """The modules of the standard library, one after another, as uint8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if not text:
        raise SystemExit(f"no Python source files in {folder}: this Python was installed without them")
    return np.frombuffer(text, np.uint8)


def draw(text: np.ndarray, i: int, batch: int, length: int) -> np.ndarray:
    """The i-th batch: random windows of the text, int32 [batch, length + 1]."""
    starts = np.random.default_rng(i).integers(0, len(text) - length, batch)
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def train(step: Callable, state: tuple[GPT, nnx.Optimizer], batches: list[np.ndarray]) -> list[float]:
    """The loss of each step."""
    return [float(step(*state, batch)) for batch in batches]


def time_steps(runs: dict[str, Callable[[], jax.Array]], rounds: int) -> dict[str, float]:
    """Median seconds of a step of each run; they take turns, so that all meet the same noise. The first is
    not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run().block_until_ready()
            if i > 0:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def compare_losses(parallel: list[float], single: list[float]) -> float:
    """Prints both runs side by side; returns the largest difference."""
    differences = [abs(a - b) for a, b in zip(parallel, single, strict=True)]
    print(f"\n{'step':>4}  {'parallel':>9}  {'1 device':>9}  difference")
    for i, (a, b, difference) in enumerate(zip(parallel, single, differences, strict=True)):
        print(f"{i:4}  {a:9.5f}  {b:9.5f}  {difference:.1e}")
    return max(differences)


def compare_layouts(
    plan: autoplan.Plan, fresh: Callable, key: jax.Array, batch: np.ndarray, rounds: int
) -> list[dict]:
    """Runs the chosen plan and the classic layouts on the plan's mesh; prints and returns a row for each.

    `fresh(key)` makes the state, `rounds` is the number of timed steps.
    """
    mesh_shape = plan.mesh.axis_sizes
    steps = {"chosen": train_step} | {
        name: autoplan.parallelize(train_step.__wrapped__, layout=name, mesh_shape=mesh_shape)
        for name in CLASSIC
    }
    runs, rows = {}, []
    for name, step in steps.items():
        predicted = step.plan(*nnx.eval_shape(fresh, key), batch)
        state = step.init(fresh, key)
        rows.append(
            {
                "layout": name,
                "predicted_step_time_s": predicted.step_time_s,
                "predicted_peak_memory_bytes": predicted.peak_memory_bytes,
            }
        )
        runs[name] = lambda step=step, state=state: step(*state, batch)
    measured = time_steps(runs, rounds)
    print(f"\none step on a mesh of {' x '.join(map(str, mesh_shape))}, median of {rounds} steps:")
    print(f"{'layout':8}  {'measured':>9}  {'predicted':>9}  predicted peak memory per device")
    for row in rows:
        row["step_time_s"] = measured[row["layout"]]
        print(
            f"{row['layout']:8}  {row['step_time_s']:7.3f} s  {row['predicted_step_time_s']:7.3f} s  "
            f"{row['predicted_peak_memory_bytes'] / 2**20:.0f} MiB"
        )
    return rows


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=15, help="training steps of each of the two runs (default 15)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each layout (default 3)")
    parser.add_argument("--width", type=int, default=WIDTH, help=f"width of the model (default {WIDTH})")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"layers (default {LAYERS})")
    parser.add_argument("--length", type=int, default=LENGTH, help=f"bytes in an example (default {LENGTH})")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"examples in a batch (default {BATCH})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write losses and times there")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    text = read_text()
    batches = [draw(text, i, args.batch, args.length) for i in range(args.steps)]
    key = jax.random.key(args.seed)

    def fresh(key: jax.Array) -> tuple[GPT, nnx.Optimizer]:
        return make_state(key, args.width, args.layers, args.length)

    abstract = nnx.eval_shape(fresh, key)
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract[0], nnx.Param)))
    print(
        f"{count / 1e6:.1f}M parameters, {len(text) / 1e6:.1f} MB of text, {jax.device_count()} devices "
        f"({jax.devices()[0].device_kind})\n"
    )
    plan = train_step.plan(*abstract, batches[0])
    print(plan)

    parallel = train(train_step, train_step.init(fresh, key), batches)
    single = train(nnx.jit(train_step.__wrapped__, donate_argnums=(0, 1)), jax.jit(fresh)(key), batches)
    difference = compare_losses(parallel, single)
    rows = compare_layouts(plan, fresh, key, batches[0], args.rounds)
    if args.json:
        args.json.write_text(
            json.dumps(
                {
                    "parameters": count,
                    "mesh": list(plan.mesh.axis_sizes),
                    "planning_time_s": plan.planning_time_s,
                    "parallel_losses": parallel,
                    "single_losses": single,
                    "layouts": rows,
                },
                indent=2,
            )
            + "\n"
        )
    if not difference < LOSS_TOLERANCE:
        raise SystemExit(f"the parallel losses differ from the single-device ones by {difference:.1e}")


if __name__ == "__main__":
    main()
