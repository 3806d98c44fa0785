"""The command line: `autoplan plan FILE:FUNCTION --cluster CLUSTER` plans a step without any device and
prints why; `autoplan verify` compiles the plan as well and compares; `autoplan profile` measures the devices at hand.

`main` returns the exit code: 0 for a plan, 1 if there is none (nothing fits, or the user's code failed) or if the
compiler makes something else of it, 2 if the command itself is wrong. Errors are one message on stderr; `--debug`
adds the traceback. What the user's code prints goes to stderr too, so that stdout holds the report or the JSON alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path
import sys
import traceback
from types import ModuleType, TracebackType
from typing import Any

import jax

from . import api
from .cost_models import parse_cluster
from .errors import PlanError
from .plan import Plan
from .profiling import command as profiling
from .units import parse_bytes

OK, FAILED, USAGE = 0, 1, 2
LAYOUTS = ("auto", "data", "fsdp", "tensor")
DEFAULT_ARGS = "example_args"

_DESCRIPTION = "Lay a JAX training step out over a mesh of TPUs or GPUs."
_WRITE_ARGS = (
    ". Write one that returns the tuple of the step's arguments (arrays or jax.ShapeDtypeStructs), or name "
    "another with --args FILE:FUNCTION"
)
_PLAN_EPILOG = f"""\
FILE:FUNCTION is a function in a Python file, or in a module as module:function. It may be a plain function
or one that is decorated with @autoplan.parallelize; then its options hold wherever none is given here. Its
example arguments come from a function that returns them as a tuple, arrays or jax.ShapeDtypeStructs.

examples:
  autoplan plan train.py:train_step --cluster v5e:4x4
  autoplan plan train.py:train_step --cluster 4x8xH100 --memory 60GiB --save plan.json
  autoplan plan train.py:train_step --cluster v5e:4x4 --mesh 4x4 --layout fsdp
  autoplan plan mylib.train:step --args shapes.py:llama_8b --cluster v5p:4x4x4 --json

exit codes:
  {OK}  a plan was made
  {FAILED}  no plan: nothing fits or can be laid out as asked, or the program failed
  {USAGE}  wrong usage: an unknown option, file, function, cluster or size

No device is used. JAX runs on the CPU unless JAX_PLATFORMS says otherwise."""

_PROFILE_EPILOG = f"""\
Measures matmuls, convolutions, operations bound by memory, and every collective over every size of mesh axis, with all
devices at work. What is finished is saved at once: after Ctrl-C, the same command goes on. Profiles are kept in
$AUTOPLAN_CACHE, $XDG_CACHE_HOME/autoplan or ~/.cache/autoplan, one for each cluster and version of JAX; plans for just
that cluster use them.

examples:
  autoplan profile
  autoplan profile --cluster cpu:8 --quick
  autoplan profile --json > profile.json

exit codes:
  {OK}    measured, or cleared
  {FAILED}    the devices at hand are not those of the cluster, or nothing is known of them
  {USAGE}    wrong usage
  130  stopped by Ctrl-C"""


_VERIFY_EPILOG = f"""\
FILE:FUNCTION and the options are those of `autoplan plan`. The compiler is JAX's own for cpu:N, libtpu's for
TPUs (pip install 'autoplan[tpu-aot]') and that of JAX's CUDA plugin for GPUs (pip install 'autoplan[gpu-aot]');
none needs the hardware.

examples:
  autoplan verify train.py:train_step --cluster v5e:4x4
  autoplan verify train.py:train_step --cluster v5e:4x4 --plan plan.json --json

exit codes:
  {OK}  the compiled program fits, and at most 1 % of what it sends was not planned
  {FAILED}  it does not, or there is no plan, or it cannot be compiled here
  {USAGE}  wrong usage: an unknown option, file, function, cluster or size"""


class _UsageError(Exception):
    """The command is wrong."""


class _ProgramError(Exception):
    """The user's code raised an error while it was doing what the message says."""

    def __init__(self, doing: str, raised: BaseException) -> None:
        super().__init__(doing)
        self.raised = raised


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line (default: the process's) and returns its exit code."""
    parser = _parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as end:  # argparse has printed the help or the error
        return end.code if isinstance(end.code, int) else USAGE
    try:
        return options.run(options)
    except _UsageError as error:
        return _failed(options, str(error), USAGE)
    except PlanError as error:
        return _failed(options, str(error), FAILED)
    except _ProgramError as error:
        return _failed(options, f"{error}: {_described(error.raised)}", FAILED)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="autoplan", description=_DESCRIPTION, formatter_class=raw)
    parser.add_argument(
        "--version", action="version", version=f"autoplan {importlib.metadata.version('autoplan')}"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    text = "plan a step and print what was chosen, what it costs and why"
    plan = commands.add_parser("plan", help=text, description=text, epilog=_PLAN_EPILOG, formatter_class=raw)
    _add_step_options(plan)
    plan.add_argument("--save", metavar="PATH", help="write the plan file there")
    plan.add_argument("--json", action="store_true", help="print the plan file's text instead of the report")
    plan.add_argument("--verify", action="store_true", help="compile plans, and take the best whose program fits")
    plan.set_defaults(run=_run_plan, command="plan")
    _add_verify(commands)
    _add_profile(commands)
    return parser


def _add_step_options(plan: argparse.ArgumentParser) -> None:
    """What step to plan, and how: the options that `plan` and `verify` share."""
    plan.add_argument("target", metavar="FILE:FUNCTION", help="the step")
    plan.add_argument(
        "--cluster",
        required=True,
        type=_checked(_cluster),
        metavar="CLUSTER",
        help="what to plan for, such as v5e:4x4, 8xH100, 4x8xH100 or cpu:8",
    )
    plan.add_argument(
        "--args",
        metavar="FILE:FUNCTION",
        help=f"what returns the example arguments (default: {DEFAULT_ARGS} in the step's file)",
    )
    plan.add_argument(
        "--memory",
        type=_checked(parse_bytes),
        metavar="SIZE",
        help="memory to use per device, such as 16GiB (default: the device's)",
    )
    plan.add_argument(
        "--mesh",
        type=_checked(_mesh_shape),
        metavar="SHAPE",
        help="the mesh's shape, such as 2x4 (default: the best)",
    )
    plan.add_argument("--layout", choices=LAYOUTS, help="auto searches; the others force a classic layout")
    plan.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _add_verify(commands: argparse._SubParsersAction) -> None:
    text = "plan a step, compile the plan without the cluster, and compare what the compiler made of it"
    verify = commands.add_parser(
        "verify",
        help=text,
        description=text,
        epilog=_VERIFY_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_step_options(verify)
    verify.add_argument("--plan", metavar="PATH", help="verify this plan file instead of searching")
    verify.add_argument("--full", action="store_true", help="let the compiler generate code too")
    verify.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="give up compiling after that (default: 600)"
    )
    verify.add_argument("--json", action="store_true", help="print all that was found as JSON instead of the report")
    verify.set_defaults(run=_run_verify, command="verify")


def _run_verify(options: argparse.Namespace) -> int:
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    with contextlib.redirect_stdout(sys.stderr):
        plan = _make_plan(options, Plan.load(options.plan) if options.plan else None)
        verification = plan.verify(full=options.full, timeout_s=options.timeout)
    print(verification.to_json() if options.json else verification, end="" if options.json else "\n", flush=True)
    return OK if verification.ok else FAILED


def _add_profile(commands: argparse._SubParsersAction) -> None:
    text = "measure the devices at hand, so that plans for them are made by what they reach"
    profile = commands.add_parser(
        "profile",
        help=text,
        description=text,
        epilog=_PROFILE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    profile.add_argument(
        "--cluster",
        type=_checked(_cluster),
        metavar="CLUSTER",
        help="what the devices are, such as 8xH100; cpu:8 simulates them (default: all devices that JAX has)",
    )
    profile.add_argument("--quick", action="store_true", help="fewer sizes: under a minute on cpu:8")
    profile.add_argument("--json", action="store_true", help="print the profile file's text instead of a table")
    profile.add_argument("--clear", action="store_true", help="remove what was measured instead")
    profile.add_argument("--debug", action="store_true", help="show the traceback of an error")
    profile.set_defaults(run=_run_profile, command="profile")


def _run_profile(options: argparse.Namespace) -> int:
    if options.clear and (options.quick or options.json):
        raise _UsageError("--clear measures nothing: leave --quick and --json out")
    return profiling.run(options.cluster, quick=options.quick, as_json=options.json, clear=options.clear)


def _run_plan(options: argparse.Namespace) -> int:
    if options.save and not Path(options.save).absolute().parent.is_dir():
        raise _UsageError(f"--save {options.save}: there is no such folder")
    if options.save and Path(options.save).is_dir():
        raise _UsageError(f"--save {options.save}: this is a folder; give the path of a file")
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    with contextlib.redirect_stdout(sys.stderr):
        plan = _make_plan(options)
    print(plan.to_json() if options.json else plan, end="" if options.json else "\n", flush=True)
    if options.save:
        try:
            plan.save(options.save)
        except OSError as error:
            raise _UsageError(f"--save {options.save}: {error.strerror}") from error
    return OK


def _make_plan(options: argparse.Namespace, known: Plan | None = None) -> Plan:
    """The plan of the step that the options name; `known` if it is for that step."""
    step = _load(options.target)
    if options.args:
        make_args = _load(options.args)
    else:
        module = options.target.rpartition(":")[0]
        make_args = _load(f"{module}:{DEFAULT_ARGS}", f"{module} has no function {DEFAULT_ARGS}{_WRITE_ARGS}")
    with _program(f"{options.args or DEFAULT_ARGS} failed"):
        args = make_args()
    if not isinstance(args, tuple):
        name = options.args or DEFAULT_ARGS
        raise PlanError(
            f"{name} must return the tuple of the step's arguments",
            got=f"a {type(args).__name__}",
            action="For a single argument, return (argument,)",
        )
    given = {
        "cluster": options.cluster,
        "memory": options.memory,
        "mesh_shape": options.mesh,
        "layout": options.layout,
        "plan": known,
    }
    given = {name: value for name, value in given.items() if value is not None}
    with _program(f"{options.target} cannot be planned"):
        return _parallelized(step, given).plan(*args, verify=getattr(options, "verify", None) or None)


def _parallelized(step: Callable[..., Any], given: dict[str, Any]) -> api.Parallelized:
    """The step with the given options; what else its decorator says stays."""
    if not isinstance(step, api.Parallelized):
        return api.parallelize(step, **given)
    return step.with_options(**given)


# The user's code.


def _load(target: str, missing: str | None = None) -> Callable[..., Any]:
    """The function that FILE:FUNCTION or module:function names; `missing` is the error if it is not there."""
    where, colon, name = target.rpartition(":")
    if not (colon and where and name):
        raise _UsageError(f"{target!r} names no function: write FILE:FUNCTION, such as train.py:train_step")
    module = _import_file(Path(where)) if _is_file(where) else _import_module(where)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        functions = [
            key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
        ]
        own = [key for key in functions if getattr(vars(module)[key], "__module__", None) == module.__name__]
        raise _UsageError(missing or f"{where} has no function {name!r}; it has {', '.join(own) or 'none'}")
    if not callable(found):
        raise _UsageError(f"{target} is no function but a {type(found).__name__}")
    return found


def _is_file(where: str) -> bool:
    return where.endswith(".py") or os.sep in where or Path(where).is_file()


def _import_file(path: Path) -> ModuleType:
    """Imports a file as Python would import it from its own folder; once, if it is asked for again."""
    path = path.resolve()
    if not path.is_file():
        raise _UsageError(f"there is no file {path}")
    _first_on_path(path.parent)
    name = path.stem
    while (loaded := sys.modules.get(name)) is not None:
        if getattr(loaded, "__file__", None) and Path(loaded.__file__).resolve() == path:
            return loaded
        name = f"_{name}"  # the file is called like a module that is in use, such as json.py
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise _UsageError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _program(f"importing {path.name} failed"):
            spec.loader.exec_module(module)
    except _ProgramError:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    _first_on_path(Path.cwd())
    with _program(f"importing {name} failed"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                raise _UsageError(f"there is no file or module {name}") from error
            raise


def _first_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@contextlib.contextmanager
def _program(doing: str) -> Iterator[None]:
    """What the user's code raises inside becomes a `_ProgramError`; our own errors pass."""
    try:
        yield
    except (PlanError, _UsageError, _ProgramError):
        raise
    except (Exception, SystemExit) as error:
        raise _ProgramError(doing, error) from error


# Errors.


def _failed(options: argparse.Namespace, message: str, code: int) -> int:
    if options.debug:
        traceback.print_exc()
    hint = "" if options.debug or code == USAGE else "\n(--debug shows the traceback)"
    print(f"autoplan {options.command}: error: {message}{hint}", file=sys.stderr)
    return code


def _described(error: BaseException) -> str:
    """What was raised and, in the user's code if the error passed through it, where."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} [{Path(error.filename or '?').name}:{error.lineno}]"
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    source = _last_user_line(error.__traceback__)
    return f"{text} [{source}]" if source else text


def _last_user_line(trace: TracebackType | None) -> str:
    """The last line of a traceback in no installed package, as "file:line (function)"; "" if none."""
    own = str(Path(__file__).parent)
    installed = (f"{os.sep}site-packages{os.sep}", f"{os.sep}lib{os.sep}python")
    for frame in reversed(traceback.extract_tb(trace)):
        if not (frame.filename.startswith((own, "<")) or any(part in frame.filename for part in installed)):
            return f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})"
    return ""


# Values of options. Each raises ValueError with the message for the user.


def _checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """For argparse, which shows the message of no other error than its own."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _cluster(text: str) -> str:
    parse_cluster(text)
    return text


def _mesh_shape(text: str) -> tuple[int, ...]:
    sizes = text.lower().split("x")
    if not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
        raise ValueError(f"{text!r} is no mesh shape: write the sizes of its axes, such as 2x4")
    return tuple(int(size) for size in sizes)
