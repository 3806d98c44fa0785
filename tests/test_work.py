"""What moves through memory once the compiler has fused a step, and what hides behind arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoplan
from autoplan.cost_models import parse_cluster
from autoplan.fusion import fusions_of
from autoplan.graph import build_graph
from autoplan.work import work_of

CHIP = parse_cluster("v5e:2x2").device


def work(fun, *shapes, platform="tpu"):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    trace = autoplan.parallelize(fun, cluster="cpu:1").trace(*arguments).trace
    graph = build_graph(trace, narrow=platform == "tpu")
    device = CHIP if platform == "tpu" else parse_cluster("8xH100").device
    return graph, work_of(graph, fusions_of(graph, platform), device, 1)


def of(graph, found, name):
    return [found.read_bytes[n.index] for n in graph.nodes if n.name == name]


def test_a_chain_reads_its_sources_once_and_where_it_ends():
    graph, found = work(lambda x, y: jnp.tanh(x * y + x), (8192, 8192), (8192, 8192))
    size = 4 * 8192**2
    assert of(graph, found, "tanh") == [2 * size]
    assert of(graph, found, "mul") == of(graph, found, "add") == [0.0]


def test_what_follows_a_large_matmul_hides_behind_it_on_a_tpu_only():
    def layer(x, w):
        return jnp.tanh(x @ w)

    shapes = (16384, 16384), (16384, 16384)
    graph, found = work(layer, *shapes)
    tanh = next(n for n in graph.nodes if n.name == "tanh")
    written_s = 4 * 16384**2 / (CHIP.memory_bytes_per_s * CHIP.memory_efficiency)
    assert found.hidden_s[tanh.index] == pytest.approx(written_s)  # the product itself is at hand
    graph, found = work(layer, *shapes, platform="gpu")
    assert not np.any(found.hidden_s)


def test_a_matmul_that_waits_for_memory_hides_nothing():
    graph, found = work(lambda x, w: jnp.tanh(x @ w), (65536, 16), (16, 65536))
    assert not np.any(found.hidden_s)


def test_what_needs_a_whole_row_first_is_not_made_with_the_product():
    def softmax(x, w):
        scores = x @ w
        return scores / scores.sum(axis=1, keepdims=True)

    graph, found = work(softmax, (16384, 16384), (16384, 16384))
    div, total = (next(n for n in graph.nodes if n.name == name) for name in ("div", "reduce_sum"))
    assert found.hidden_s[total.index] >= 0.0 and found.read_bytes[total.index] == 0.0
    assert found.hidden_s[div.index] == 0.0 and found.read_bytes[div.index] >= 4 * 16384**2


def test_small_values_stay_on_the_chip_half_of_the_time():
    graph, found = work(lambda x, w, v: jnp.tanh(x @ w) @ v, (1024, 1024), (1024, 1024), (1024, 1024))
    dots = [n for n in graph.nodes if n.name == "dot_general"]
    assert found.streamed[dots[0].results[0]] == 0.5
    assert found.streamed[dots[-1].results[0]] == 1.0  # a result of the step
