"""The partitioner's rules, read through the compatibility module, and what strategies follow from them."""

from __future__ import annotations

from collections.abc import Callable
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoplan import compat
from autoplan.layouts import PARTIAL, to_spec
from autoplan.plan import to_partition_spec
from autoplan.rules import Rule, compose, flops_of, rules_of
from autoplan.strategies import CARRY, NONE, enumerate_strategies


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def equations(fun: Callable, *args) -> list[compat.JaxprEqn]:
    def flat(jaxpr):
        for eqn in jaxpr.eqns:
            subs = compat.subjaxprs(eqn) if eqn.primitive.name == "jit" else ()
            if subs:
                yield from flat(subs[0].jaxpr)
            else:
                yield eqn

    return list(flat(compat.open_jaxpr(jax.make_jaxpr(fun)(*args))))


def rule_of(primitive: str, fun: Callable, *args) -> Rule:
    eqns = [eqn for eqn in equations(fun, *args) if eqn.primitive.name == primitive]
    (rule,) = rules_of(eqns[:1])
    return rule


def sizes(rule: Rule, factors) -> list[int]:
    return sorted(rule.sizes[f] for f in factors)


def test_a_matmul_has_three_factors_and_reduces_one() -> None:
    rule = rule_of("dot_general", jnp.dot, array(8, 16), array(16, 32))
    assert sizes(rule, range(3)) == [8, 16, 32] and sizes(rule, rule.reduction) == [16]
    assert not rule.blocked and not rule.unknown


def test_a_reshape_splits_a_dim_into_factors_major_first() -> None:
    rule = rule_of("reshape", lambda x: x.reshape(8, 4, 6), array(8, 24))
    (_, (major, minor)), (_, (first,), (second,)) = rule.operands[0], rule.results[0]
    assert (major, minor) == (first, second) and (rule.sizes[major], rule.sizes[minor]) == (4, 6)
    options = enumerate_strategies(rule, (2, 2))
    # The minor factor may be split only below a fully split major one: over two axes of 2, the 4 must come first.
    assert not ((options.choice == minor).any(axis=1) & ~(options.choice == major).any(axis=1)).any()


def test_an_embedding_reduces_over_the_vocabulary_forward_and_splits_it_backward() -> None:
    def embed(table, tokens):
        return table[tokens].sum()

    table, tokens = array(1000, 16), array(8, 4, dtype=jnp.int32)
    forward = rule_of("gather", embed, table, tokens)
    assert sizes(forward, forward.reduction) == [1000]
    backward = rule_of("scatter-add", jax.grad(embed), table, tokens)
    assert 1000 in [backward.sizes[f] for dim in backward.results[0] for f in dim]


@pytest.mark.parametrize(("primitive", "fun", "free", "whole"), [
    ("cumsum", lambda x: jax.lax.cumsum(x, axis=1), 8, 16),
    ("sort", jax.lax.sort, 8, 16),
    ("top_k", lambda x: jax.lax.top_k(x, 3), 8, 16),
])
def test_a_dim_along_which_values_meet_is_not_split(primitive: str, fun: Callable, free: int, whole: int) -> None:
    rule = rule_of(primitive, fun, array(8, 16))
    (first,), (second,) = rule.operands[0]
    assert (rule.sizes[first], rule.sizes[second]) == (free, whole)
    assert first not in rule.blocked and second in rule.blocked
    assert rule.results[0][0] == (first,)


@pytest.mark.parametrize("fun", [jax.lax.erf_inv, jnp.tanh, jax.lax.lgamma, lambda x: x**3])
def test_special_functions_are_elementwise(fun: Callable) -> None:
    (rule,) = rules_of(equations(fun, array(8, 16))[:1])
    assert rule.elementwise and rule.operands[0] == rule.results[0]


def test_a_decomposition_keeps_its_matrices_whole() -> None:
    rule = rule_of("cholesky", jnp.linalg.cholesky, array(8, 16, 16))
    options = enumerate_strategies(rule, (2,))
    assert {tuple(r) for r in options.results[0]} <= {(-1,), (0,)}


def test_an_effect_has_no_rule_and_says_so() -> None:
    def shout(x):
        jax.debug.print("{}", x)
        return x

    (rule,) = rules_of([eqn for eqn in equations(shout, array(8)) if eqn.effects])
    assert rule.unknown and len(enumerate_strategies(rule, (2, 2))) == 1


def test_random_bits_of_a_typed_key_may_be_made_in_parts() -> None:
    rule = rule_of("random_bits", lambda key: jax.random.bits(key, (8, 16)), jax.eval_shape(lambda: jax.random.key(0)))
    assert rule.operands == ((),)
    assert len(enumerate_strategies(rule, (2,))) == 3


def test_strategies_of_a_matmul() -> None:
    rule = rule_of("dot_general", jnp.dot, array(8, 16), array(16, 32))
    options = enumerate_strategies(rule, (2, 4), "dot_general")
    assert len(options) == 4**2 and (options.choice[0] == NONE).all()
    for choice, left, right, out, splits in zip(options.choice, *options.operands, options.results[0], options.splits):
        for axis, factor in enumerate(choice):
            is_sum = factor in rule.reduction
            assert (out[axis] == PARTIAL) == is_sum
            assert (left[axis] == 1 and right[axis] == 0) == is_sum
        assert splits == math.prod(size for size, factor in zip((2, 4), choice) if factor != NONE)


def test_an_addition_may_carry_a_pending_sum_and_a_product_may_not() -> None:
    for fun, name, carries in ((jnp.add, "add", True), (jnp.multiply, "mul", False)):
        rule = rule_of(name, fun, array(8, 16), array(8, 16))
        choice = enumerate_strategies(rule, (2,), name).choice
        assert (choice == CARRY).any() == carries


def test_flops() -> None:
    dot, = equations(jnp.dot, array(8, 16), array(16, 32))
    assert flops_of(dot, rules_of([dot])[0]) == 2 * 8 * 16 * 32

    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
                                            feature_group_count=2)

    conv, = equations(convolve, array(2, 8, 8, 4), array(3, 3, 2, 6))
    assert flops_of(conv, rules_of([conv])[0]) == 2 * np.prod((2, 8, 8, 6)) * 3 * 3 * 2


def test_a_convolution_splits_batch_and_features_and_keeps_its_window() -> None:
    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    rule = rule_of("conv_general_dilated", convolve, array(8, 10, 10, 16), array(3, 3, 16, 32))
    free = {f for f in range(len(rule.sizes)) if f not in rule.blocked}
    assert sizes(rule, free) == [8, 16, 32] and sizes(rule, rule.reduction) == [16]


def test_several_operations_are_composed_along_the_dims_they_share() -> None:
    def softmax_of_product(x, w):
        return jax.nn.softmax(x @ w)

    composed = compat.lower_with_rules([(softmax_of_product, (array(8, 16), array(16, 32)))])
    rule = compose(composed[0], [2, 2], [2])
    ((rows,), (inner,)), ((inner_too,), (columns,)) = rule.operands
    assert inner == inner_too and rule.results == (((rows,), (columns,)),)
    assert rule.reduction == {inner}
    # The normaliser reduces over the columns and is then broadcast along them: they are not split.
    assert columns in rule.blocked and rows not in rule.blocked


def test_a_dim_that_two_operations_split_in_other_ways_is_cut_into_the_factors_of_both() -> None:
    def twice(x):
        return x.reshape(2, 12).reshape(24).reshape(4, 6)

    (found,) = compat.lower_with_rules([(twice, (array(24),))])
    rule = compose(found, [1], [2])
    assert [rule.sizes[f] for f in rule.operands[0][0]] == [2, 2, 6]
    assert [[rule.sizes[f] for f in dim] for dim in rule.results[0]] == [[2, 2], [6]]
    first, second, third = rule.operands[0][0]
    assert rule.results[0] == ((first, second), (third,))


def differential_cases() -> list:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    rows = rng.integers(0, 16, (8,)).astype(np.int32)
    return [
        ("dot_general", lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (normal(2, 8, 4), normal(2, 4, 8))),
        ("gather", lambda x, i: x[i], (normal(16, 8), rows)),
        ("scatter-add", lambda x, i, u: x.at[i].add(u), (normal(16, 8), rows, normal(8, 8))),
        ("reshape", lambda x: x.reshape(4, 2, 8), (normal(8, 8),)),
        ("reduce_max", lambda x: x.max(1), (normal(8, 16),)),
        ("sort", lambda x: jnp.sort(x, axis=0), (normal(8, 16),)),
    ]


@pytest.mark.parametrize(
    ("primitive", "fun", "args"), [pytest.param(*case, id=case[0]) for case in differential_cases()]
)
def test_every_strategy_computes_what_the_operation_does(primitive: str, fun: Callable, args: tuple) -> None:
    """The partitioner is asked for exactly what a strategy means: operands and results in its layouts."""
    eqn = next(e for e in equations(fun, *args) if e.primitive.name == primitive)
    assert len(eqn.invars) == len(args)
    rng, names, (rule,) = np.random.default_rng(1), ("x", "y"), rules_of([eqn])
    options = enumerate_strategies(rule, (2, 4), primitive)
    # An index operand keeps the values of `args`; its shape may have a trailing dim more.
    values = [np.reshape(a, v.aval.shape) if np.size(a) == np.prod(v.aval.shape) else rng.random(v.aval.shape)
              for a, v in zip(args, eqn.invars)]
    alone = compat.eqn_function(eqn)
    (expected,) = jax.jit(alone)(*values)
    mesh = jax.make_mesh((2, 4), names, axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def sharding(layout, rank: int) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(mesh, to_partition_spec(to_spec(layout, rank, names)))

    chosen = np.unique(np.linspace(1, len(options) - 1, 8).astype(int))
    for s in chosen:
        ins = tuple(sharding(o[s], np.ndim(v)) for o, v in zip(options.operands, values))
        out = sharding(options.results[0][s], expected.ndim)
        (actual,) = jax.jit(alone, in_shardings=ins, out_shardings=[out])(*values)
        said = f"{options.choice[s]} {ins} {out}"
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, err_msg=said)


def grouped(groups: int, features: int, window: int) -> tuple[Callable, tuple]:
    """(a step that gives value, weight gradient and input gradient of a grouped convolution, its arguments)"""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 8, 8, features), dtype=np.float32)
    w = rng.standard_normal((window, window, features // groups, features), dtype=np.float32)

    def step(x, w):
        def convolve(x, w):
            return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
                                                feature_group_count=groups)

        out, pull = jax.vjp(convolve, x, w)
        return out, *pull(out)

    return step, (x, w)


@pytest.mark.parametrize(("groups", "window"), [(16, 3), (4, 3), (4, 1), (1, 3)])
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_no_strategy_of_a_convolution_is_one_that_xla_computes_wrongly(groups: int, window: int, shape: tuple) -> None:
    """XLA's partitioner gives wrong sums, or aborts, for many splits of grouped convolutions and their gradients."""
    step, args = grouped(groups, 16, window)
    names = ("x", "y")[:len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    rng = np.random.default_rng(1)
    for eqn in (e for e in equations(step, *args) if e.primitive.name == "conv_general_dilated"):
        (rule,), alone = rules_of([eqn]), compat.eqn_function(eqn)
        options = enumerate_strategies(rule, shape, eqn.primitive.name)
        assert len(options) > 1, "the batch, at least, may be split over all axes"
        values = [rng.standard_normal(v.aval.shape, dtype=np.float32) for v in eqn.invars]
        (expected,) = jax.jit(alone)(*values)

        def sharding(layout, rank: int) -> jax.sharding.NamedSharding:
            return jax.sharding.NamedSharding(mesh, to_partition_spec(to_spec(layout, rank, names)))

        for s in range(1, len(options)):
            ins = tuple(sharding(o[s], v.ndim) for o, v in zip(options.operands, values))
            out = sharding(options.results[0][s], expected.ndim)
            (actual,) = jax.jit(alone, in_shardings=ins, out_shardings=[out])(*values)
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3, err_msg=f"{options.choice[s]}")


def test_empty_arrays_have_rules() -> None:
    (rule,) = rules_of(equations(lambda x: jnp.concatenate([x[:0], x]), array(8, 4))[-1:])
    assert len(rule.results) == 1
    jax.eval_shape(lambda x: jax.lax.associative_scan(jnp.add, x), array(8, 4))
    found = rules_of(equations(lambda x: jax.lax.associative_scan(jnp.add, x), array(8, 4)))
    assert all(len(r.results) >= 1 for r in found)
