"""The partitioner's rules, read through the compatibility module, and what strategies follow from them."""

from __future__ import annotations

from collections.abc import Callable
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoplan import compat
from autoplan.layouts import PARTIAL
from autoplan.rules import Rule, flops_of, rules_of
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
