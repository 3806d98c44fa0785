"""Where profiles are kept: one JSON file per cluster and version of JAX, in the user's cache folder."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
import re
import warnings

from ..cost_models import Cluster, Profile, ProfileError

CACHE_VARIABLE = "AUTOPLAN_CACHE"


def cache_folder() -> Path:
    """$AUTOPLAN_CACHE, or autoplan's part of $XDG_CACHE_HOME, or ~/.cache/autoplan. It need not exist."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autoplan"


def jax_versions() -> tuple[str, str]:
    """Installed versions of jax and jaxlib."""
    return importlib.metadata.version("jax"), importlib.metadata.version("jaxlib")


def cores() -> int:
    """Processor cores that this process may use; simulated devices share them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def profile_path(cluster: Cluster) -> Path:
    """The file of a cluster's profile under the installed JAX; it need not exist.

    Its name holds the cluster's (device kind, count and wiring), the cores if its devices are simulated, and the
    versions of jax and jaxlib.
    """
    name = re.sub(r"[^\w.-]+", "-", cluster.name)
    shared = f"-{cores()}cores" if cluster.device.platform == "cpu" else ""
    jax_version, jaxlib_version = jax_versions()
    return cache_folder() / "profiles" / f"{name}{shared}-jax{jax_version}-jaxlib{jaxlib_version}.json"


def find_profile(cluster: Cluster) -> Profile | None:
    """The finished profile of exactly this cluster, or None. A file that is no profile is warned of and ignored."""
    path = profile_path(cluster)
    try:
        profile = Profile.from_json(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ProfileError, OSError, UnicodeDecodeError) as error:
        warnings.warn(
            f"the profile {path} is ignored: {error}. `autoplan profile --clear` removes it", stacklevel=2
        )
        return None
    return profile if profile.complete and profile.fits(cluster) else None


def save(profile: Profile, path: Path) -> None:
    """Writes a profile in one step, so that a file is never half there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(profile.to_json())
    draft.replace(path)
