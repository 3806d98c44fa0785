"""Clusters of one's own, from a small TOML or JSON file. See `load_cluster` for what may be in it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
import json
from pathlib import Path
import re
import tomllib
from typing import Any

from .devices import ALIASES, DEVICES, DeviceSpec
from .efficiency import shipped_tables
from .fabrics import HOST_SIZES, TORUS_DIMS, gpu_levels, tpu_levels
from .topology import Level

SUFFIXES = (".toml", ".json")
_SIZE = re.compile(r"([\d.]+)\s*(B|[KMGT]B|[KMGT]iB)", re.IGNORECASE)
_LINK_KEYS = ("name", "bytes_per_s", "base_latency_s", "latency_s")
_USABLE = 0.9  # of a device's memory, where the file does not say; JAX takes 75 % of a GPU's by default


class ClusterFileError(ValueError):
    """A cluster file that cannot be read: the message names the file, the key, and what was expected."""


def is_cluster_file(text: str) -> bool:
    """Whether a cluster's text is a file's path."""
    return text.strip().lower().endswith(SUFFIXES)


def load_cluster(path: str | Path) -> tuple[str, DeviceSpec, tuple[Level, ...]]:
    """Name, device and wiring of a cluster file; `parse_cluster` makes a `Cluster` of them.

      name               the cluster's name; the file's if left out
      device             a known device's name, or a table [device]:
        like             a known device, from which every figure that is not given is taken; without it, all
                         of the following but name, usable_memory (0.9 of memory) and op_overhead_s (0) must be there
        name, platform   platform is "gpu", "tpu" or "cpu"
        peak_flops_per_s a table of rates by dtype, with float32
        memory           capacity, "80GiB" or bytes; usable_memory: of it, what a program may take
        memory_bytes_per_s, matmul_efficiency, memory_efficiency, op_overhead_s
      hosts              hosts, or slices, on the network; 1 if left out
      devices_per_host   devices on the switch of one host; or, instead,
      torus              devices along each dim of one slice, as [4, 4], and wraps, as [true, false]
      [links]            within a host, per device, or of a torus, per link: bytes_per_s (one way, as reached),
                         latency_s (of a step), base_latency_s (of a collective), name
      [network]          between hosts, per device: the same keys

    Links that are not given are those of the device that [device] is `like`, if it has any.

    Raises:
      ClusterFileError: the file is not there, or its content is wrong.
    """
    path = Path(path)
    file = _Section(path, "", _read(path))
    device, like = _device(file)
    name = file.take("name", _text, path.stem)
    hosts = file.take("hosts", _count, 1)
    inside = file.take("devices_per_host", _count, None)
    torus = file.take("torus", _dims, None)
    if (inside is None) == (torus is None):
        raise file.error("devices_per_host", "either devices_per_host = 8 or torus = [4, 4]", "both or neither")
    wraps = file.take("wraps", _flags, None)
    if wraps is not None and (torus is None or len(wraps) != len(torus)):
        raise file.error("wraps", "one true or false for each dim of torus", wraps)
    links, network = file.table("links", None), file.table("network", None)
    file.finish()
    known = _known_levels(like, hosts, torus, inside)
    kind, sizes = ("torus", torus) if torus else ("switch", (inside,))
    inner = _level(file, "links", links, kind, sizes, wraps, known[-1] if known else None)
    if hosts == 1:
        return name, device, (inner,)
    outer = known[0] if known and len(known) == 2 else None
    return name, device, (_level(file, "network", network, "network", (hosts,), None, outer), inner)


class _Section:
    """A table of the file that is taken apart key by key, so that errors can name what is left and what is wrong."""

    def __init__(self, path: Path, prefix: str, content: Mapping[str, Any]) -> None:
        self.path, self.prefix, self.content, self.known = path, prefix, dict(content), []

    def take(self, key: str, check: Callable[[Any], Any], *default: Any) -> Any:
        """The checked value of a key; without a default it must be there."""
        self.known.append(key)
        if key not in self.content:
            if default:
                return default[0]
            raise self.error(key, check.__doc__ or "", "nothing")
        value = self.content.pop(key)
        checked = check(value)
        if checked is None:
            raise self.error(key, check.__doc__ or "", value)
        return checked

    def table(self, key: str, *default: Any) -> "_Section | None":
        found = self.take(key, _table, *default)
        return _Section(self.path, f"{self.prefix}{key}.", found) if found is not None else None

    def finish(self) -> None:
        """Refuses keys that nothing has taken."""
        if self.content:
            key = next(iter(self.content))
            raise self.error(key, f"one of {', '.join(self.known)}", "an unknown key")

    def error(self, key: str, expected: str, got: Any) -> ClusterFileError:
        shown = got if got in ("nothing", "an unknown key", "both or neither") else repr(got)
        return ClusterFileError(f"cluster file {self.path}: {self.prefix}{key}: expected {expected}, got {shown}")


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ClusterFileError(f"cluster file {path}: cannot be read: {reason}") from None
    try:
        found = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ClusterFileError(f"cluster file {path}: no valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(found, dict):
        raise ClusterFileError(f"cluster file {path}: expected a table of keys, got {found!r}")
    return found


def _device(file: _Section) -> tuple[DeviceSpec, str]:
    """The device, and the known one that it is like, or ""."""
    source = f"cluster file {file.path}"
    if isinstance(file.content.get("device"), str):
        known = file.take("device", _device_name)
        return _with_tables(DEVICES[known]), known
    given = file.table("device")
    like = given.take("like", _device_name, None)
    base = DEVICES[like] if like else None
    default = (None,) if base else ()  # a device that is like none must say its figures
    figures = {
        "peak_flops_per_s": given.take("peak_flops_per_s", _rates, *default),
        "memory_bytes": given.take("memory", _bytes, *default),
        "usable_memory_bytes": given.take("usable_memory", _bytes, None),
        "memory_bytes_per_s": given.take("memory_bytes_per_s", _positive, *default),
        "matmul_efficiency": given.take("matmul_efficiency", _fraction, *default),
        "memory_efficiency": given.take("memory_efficiency", _fraction, *default),
        "op_overhead_s": given.take("op_overhead_s", _time, None if base else 0.0),
    }
    names = {"name": given.take("name", _text, None), "platform": given.take("platform", _platform, *default)}
    given.finish()
    if base and figures["peak_flops_per_s"]:
        figures["peak_flops_per_s"] = tuple((dict(base.peak_flops_per_s) | dict(figures["peak_flops_per_s"])).items())
    if figures["memory_bytes"] and not figures["usable_memory_bytes"]:
        share = base.usable_memory_bytes / base.memory_bytes if base else _USABLE
        figures["usable_memory_bytes"] = share * figures["memory_bytes"]
    figures = {figure: value for figure, value in figures.items() if value is not None}
    names = {key: value for key, value in names.items() if value is not None}
    sources = dict.fromkeys(figures, source)
    try:
        if base is None:
            return DeviceSpec(**{"name": file.path.stem} | names, **figures, sources=tuple(sources.items())), ""
        base = base if {"peak_flops_per_s", "matmul_efficiency"} & set(figures) else _with_tables(base)
        return replace(base, **names, **figures, sources=tuple((dict(base.sources) | sources).items())), like
    except ValueError as error:
        raise ClusterFileError(f"{source}: {error}") from None


def _with_tables(device: DeviceSpec) -> DeviceSpec:
    return replace(device, tables=shipped_tables(device.name, device.peak_flops_per_s))


def _known_levels(like: str, hosts: int, torus: tuple[int, ...] | None, inside: int | None) -> tuple[Level, ...]:
    """The wiring of a known device in these numbers; none for one that is like none, or wired otherwise."""
    if torus and like in TORUS_DIMS and len(torus) == TORUS_DIMS[like]:
        return tpu_levels(like, hosts, torus)
    if inside and like in HOST_SIZES:
        return gpu_levels(like, hosts, inside)
    return ()


def _level(
    file: _Section,
    key: str,
    given: _Section | None,
    kind: str,
    sizes: tuple[int, ...],
    wraps: tuple[bool, ...] | None,
    known: Level | None,
) -> Level:
    """The level of a section [links] or [network]; what it does not say is `known`'s."""
    if given is None and known is None:
        raise file.error(key, f"a table with {', '.join(_LINK_KEYS[1:])}", "nothing")
    if known is not None and given is None and wraps is None:
        return known
    given = given or _Section(file.path, f"{key}.", {})
    own = {"bytes_per_s", "latency_s", "base_latency_s"} - set(given.content)
    rest = f"; the rest: {known.source}" if known and own else ""
    level = Level(
        kind=kind,
        name=given.take("name", _text, known.name if known else key),
        sizes=sizes,
        wraps=wraps or (known.wraps if known else (False,) * len(sizes)),
        bytes_per_s=given.take("bytes_per_s", _positive, *((known.bytes_per_s,) if known else ())),
        base_latency_s=given.take("base_latency_s", _time, known.base_latency_s if known else 0.0),
        latency_s=given.take("latency_s", _time, *((known.latency_s,) if known else ())),
        source=f"cluster file {file.path}{rest}",
        pipelined=known.pipelined if known else True,
        small_group_rates=known.small_group_rates if known and "bytes_per_s" in own else (),
    )
    given.finish()
    return level


# Checks of values: each returns what it read, or None if the value is not what its docstring says.


def _text(value: Any) -> str | None:
    """a name"""
    return value if isinstance(value, str) and value else None


def _table(value: Any) -> dict | None:
    """a table of keys"""
    return value if isinstance(value, dict) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _positive(value: Any) -> float | None:
    """a number above 0, in bytes per second"""
    number = _number(value)
    return number if number is not None and 0 < number < float("inf") else None


def _time(value: Any) -> float | None:
    """seconds, 0 or more"""
    number = _number(value)
    return number if number is not None and 0 <= number < float("inf") else None


def _fraction(value: Any) -> float | None:
    """a fraction above 0, at most 1"""
    number = _number(value)
    return number if number is not None and 0 < number <= 1 else None


def _count(value: Any) -> int | None:
    """a whole number, at least 1"""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def _dims(value: Any) -> tuple[int, ...] | None:
    """a list of whole numbers, at least 1, such as [4, 4]"""
    return tuple(value) if isinstance(value, list) and value and all(_count(size) for size in value) else None


def _flags(value: Any) -> tuple[bool, ...] | None:
    """a list of true or false"""
    return tuple(value) if isinstance(value, list) and all(isinstance(flag, bool) for flag in value) else None


def _platform(value: Any) -> str | None:
    """one of "gpu", "tpu", "cpu" (in quotes)"""
    return value if value in ("gpu", "tpu", "cpu") else None


def _rates(value: Any) -> tuple[tuple[str, float], ...] | None:
    """a table of FLOP/s by dtype, such as {bfloat16 = 312e12, float32 = 156e12}"""
    if not isinstance(value, dict) or not value or not all(_positive(rate) for rate in value.values()):
        return None
    return tuple((dtype, float(rate)) for dtype, rate in value.items())


def _bytes(value: Any) -> float | None:
    """a size such as "80GiB", or bytes"""
    if isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())):
        unit, base = found[2].lower(), 1024 if "i" in found[2].lower() else 1000
        try:
            value = float(found[1]) * base ** ("bkmgt".index(unit[0]))
        except ValueError:
            return None
    return _positive(value)


def _device_name(value: Any) -> str | None:
    """a known device"""
    names = {known.lower(): known for known in DEVICES} | {alias.lower(): name for alias, name in ALIASES.items()}
    return names.get(value.lower()) if isinstance(value, str) else None


_device_name.__doc__ = f"a known device: {', '.join(DEVICES)}"
