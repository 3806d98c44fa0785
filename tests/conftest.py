"""What every test stands on: 8 simulated CPU devices, full float32 products, and memory given back between
modules.
"""

from __future__ import annotations

import gc
import os
import tempfile

DEVICE_COUNT = 8
_COUNT_FLAG = "--xla_force_host_platform_device_count"

# Both are read when jax first makes a backend; this file is imported before any test module.
os.environ["JAX_PLATFORMS"] = "cpu"
if _COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT_FLAG}={DEVICE_COUNT}".strip()
# A profile of the developer's machine must not change what is planned here.
os.environ["AUTOPLAN_CACHE"] = tempfile.mkdtemp(prefix="autoplan-tests-")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(scope="module", autouse=True)
def _give_memory_back():
    """Drop compiled programs at the end of a module: an xdist worker would keep those of every test it ever
    ran.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """The simulated devices, at least 8."""
    found = jax.devices()
    assert len(found) >= DEVICE_COUNT, f"{len(found)} devices; XLA_FLAGS is {os.environ['XLA_FLAGS']!r}"
    return found
