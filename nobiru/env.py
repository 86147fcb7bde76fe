"""The environment: the only reader of `os.environ`.

Owns how a variable becomes an option (`max_num_seqs` is `NOBIRU_MAX_NUM_SEQS`) and what to say about variables that
cannot be used. Knows neither the options themselves (commands pass theirs in) nor how warnings are shown: it returns
them. Nothing in the environment makes it raise, since a variable may have been set by something else than the user;
Kubernetes sets `NOBIRU_PORT=tcp://10.0.0.1:80` in every pod of a namespace with a service called `nobiru`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from nobiru.errors import ConfigError

PREFIX = "NOBIRU_"
FAULT_INJECTION = "NOBIRU_FAULT_INJECTION"
NATIVE_KERNELS = "NOBIRU_NATIVE_KERNELS"
# Of the server's environment, what a rank on another machine is given.
REMOTE_RANK_VARIABLES = (
    FAULT_INJECTION,
    NATIVE_KERNELS,
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "GOMP_SPINCOUNT",
    "OMP_WAIT_POLICY",
)
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_SERVICE_LINK_NAME = re.compile(
    r"NOBIRU(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)"
)
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://\S*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option as the environment may give it.

    `type` is str, int, float, bool, a `Literal` of strings, or `tuple[str, ...]` (separated by commas). `check` raises
    `ConfigError` for a value out of range. The value of a `secret` option appears in no warning.
    """

    name: str
    type: Any
    check: Callable[[Any], object] | None = None
    secret: bool = False

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentOptions:
    """`values` by option name, only those given and usable; `warnings` are whole sentences for the user."""

    values: dict[str, Any]
    warnings: tuple[str, ...]


def read_options(
    options: Iterable[Option], *, other_names: Iterable[str] = (), environ: Mapping[str, str] | None = None
) -> EnvironmentOptions:
    """The options that `NOBIRU_*` variables give, and a warning for each variable that gives none.

    `other_names` are options of other commands: known, therefore not warned about, and not read. Never raises.
    """
    environ = os.environ if environ is None else environ
    by_variable = {option.variable: option for option in options}
    known = {*by_variable, FAULT_INJECTION, NATIVE_KERNELS, *(PREFIX + name.upper() for name in other_names)}
    values: dict[str, Any] = {}
    warnings: list[str] = []
    service_links: list[str] = []
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        text = environ[variable].strip()
        if _is_service_link(variable, text):
            service_links.append(variable)
        elif variable not in known:
            warnings.append(_unknown(variable, known - {FAULT_INJECTION}))
        elif option := by_variable.get(variable):
            try:
                _take(option, text, values)
            except ConfigError as error:
                warnings.append(error.message)
    if service_links:
        warnings.append(
            f"{', '.join(service_links)} ignored: Kubernetes sets such variables for a service whose name begins with "
            "'nobiru'; they are no options of nobiru (enableServiceLinks: false in the pod's spec turns them off)"
        )
    return EnvironmentOptions(values=values, warnings=tuple(warnings))


def resolve(explicit: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Options by precedence: explicit ones that are not None, then the environment's; the rest stays at its default."""
    return {**environment, **{name: value for name, value in explicit.items() if value is not None}}


def hub_offline() -> bool:
    """Whether the model hub must not be asked (`HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE`)."""
    return any(os.environ.get(name, "").strip().lower() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def fault_injection() -> str | None:
    """What a test asks a rank to do wrong (`NOBIRU_FAULT_INJECTION`), None outside of tests."""
    return os.environ.get(FAULT_INJECTION) or None


def native_kernels() -> bool:
    """Whether kernels may be compiled with the machine's C compiler (`NOBIRU_NATIVE_KERNELS`, on unless turned off)."""
    return os.environ.get(NATIVE_KERNELS, "").strip().lower() not in _FALSE


def cache_folder() -> Path | None:
    """Where files that can be made again are kept: `nobiru` in `XDG_CACHE_HOME`, or in `.cache` of the home folder.

    None for a user without a home, as in some containers.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nobiru"
    except RuntimeError:
        return None


def tokenize_in_calling_thread() -> None:
    """Keep the tokenizers library from threads of its own, unless the user wants them.

    In a server they would compete with the ranks for the cores, and a long text would hold up short ones in one pool.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def report_no_ray_usage() -> None:
    """Keep a Ray cluster that this process starts from reporting its use to Ray's makers, unless the user wants it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def take_over(environment: Mapping[str, str], *, num_threads: int) -> None:
    """Give a process that was started by somebody else what its rank needs, before torch is imported."""
    os.environ.update(environment, OMP_NUM_THREADS=str(num_threads))


def rank_environment(*, num_threads: int) -> dict[str, str]:
    """The environment for a rank process: this one's, with the size of OpenMP's pool set before torch is imported.

    Its threads spin for some 20 µs between two operators, unless the user chose otherwise, and then sleep. With MiniLM
    on 2 cores, sleeping at once (`OMP_WAIT_POLICY=PASSIVE`) made a single short text take 21 ms instead of 12; the
    default of 300,000 turns made it take seconds while another process kept one of the cores busy.
    """
    spin = {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": "20000"}
    return {**spin, **os.environ, "OMP_NUM_THREADS": str(num_threads)}


def _is_service_link(variable: str, text: str) -> bool:
    if _SERVICE_LINK_NAME.fullmatch(variable):
        return True
    return variable.endswith("_PORT") and _SERVICE_LINK_VALUE.fullmatch(text) is not None


def _unknown(variable: str, known: set[str]) -> str:
    near = difflib.get_close_matches(variable, sorted(known), n=3, cutoff=0.75)
    hint = f"; did you mean {' or '.join(near)}?" if near else ", and no option has a name like it"
    return f"{variable} ignored: nobiru reads no such variable{hint}"


def _take(option: Option, text: str, values: dict[str, Any]) -> None:
    """Put the option's value into `values`; `ConfigError` says why it cannot be used."""
    if not text:
        if option.secret:  # an empty secret usually is a mistake in a deployment, and it leaves the door open
            raise ConfigError(f"{option.variable} is empty and has no effect")
        return
    shown = "" if option.secret else f"={text!r}"
    try:
        value = _parse(option.type, text)
        if option.check is not None:
            option.check(value)
    except ConfigError as error:
        raise ConfigError(f"{option.variable}{shown} ignored: {error.message}") from error
    values[option.name] = value


def _parse(kind: Any, text: str) -> Any:
    if kind is bool:
        return _parse_bool(text)
    if get_origin(kind) is tuple:
        items = tuple(item for piece in text.split(",") if (item := piece.strip()))
        if not items:
            raise ConfigError("it must be a text, or several separated by commas")
        return items
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"it must be {_describe(kind)}") from error


def _parse_bool(text: str) -> bool:
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise ConfigError("it must be 1, true, yes, on, or 0, false, no, off")


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    return {int: "an integer", float: "a number"}.get(kind, f"a {getattr(kind, '__name__', kind)}")
