"""Automatic parallelization planner and compiler for JAX."""
