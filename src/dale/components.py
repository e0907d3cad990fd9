"""Components are their own configuration.

Every set, sampler, loss, aggregator, constraint, objective and schedule is a frozen keyword-only dataclass derived from
`Component`: validated on construction, printable, comparable, written to YAML and read back equal. A component of
this package is written by its class name, one of the user's by its import path ``package.module:Name``, which is
honoured on reading only when the reader says `trust=True`: a stranger's file runs nothing.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import numbers
import re
import sys
import types
import typing
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml

from dale.errors import UsageError, nearest, unknown

T = TypeVar("T")

MAX_NODES = 100_000  # a configuration has hundreds of values; a file with more, written out, is not one
MAX_DEPTH = 100
MAX_TEXT = 2**20  # characters of YAML: reading takes seconds per million

# Rooms whose import makes their components known by name.
_ROOMS = (
    "dale.perturbations",
    "dale.losses",
    "dale.samplers",
    "dale.aggregators",
    "dale.constraints",
    "dale.objectives",
    "dale.algorithms",
    "dale.data",
    "dale.training",
    "dale.attacks",
)


class Component:
    """Base of everything that is its own configuration; subclasses are frozen keyword-only dataclasses."""

    _known: ClassVar[dict[str, type[Component]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.partition(".")[0] == "dale" and not cls.__name__.startswith("_"):
            Component._known[_fold(cls.__name__)] = cls


def _fold(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def known(base: type[T]) -> dict[str, type[T]]:
    """Return the package's own concrete components below `base`, by class name."""
    for room in _ROOMS:
        importlib.import_module(room)
    return {
        cls.__name__: typing.cast("type[T]", cls)
        for cls in Component._known.values()
        if issubclass(cls, base) and dataclasses.is_dataclass(cls) and not getattr(cls, "__abstractmethods__", None)
    }


def code_path() -> Any:
    """Declare a field that names code by its import path: a file may set it only where the reader trusts it."""
    return dataclasses.field(metadata={"code": True})


def may_name_code(**options: Any) -> Any:
    """Declare a field whose text, however deep inside, may name code: import paths in it are honoured where trusted."""
    return dataclasses.field(**options, metadata={"code inside": True})


def refuse_code(plain: Any, where: str, paths: Container[tuple[str, ...]] = (), place: tuple[str, ...] = ()) -> None:
    """Raise if any text is an import path, but for the places in `paths`: a stranger's configuration runs nothing."""
    if isinstance(plain, Mapping):
        for name, value in plain.items():
            refuse_code(value, f"{where}.{name}", paths, (*place, str(name)))
    elif isinstance(plain, (list, tuple)):
        for number, value in enumerate(plain):
            refuse_code(value, f"{where}[{number}]", paths, (*place, str(number)))
    elif isinstance(plain, str) and place not in paths and is_import_path(plain):
        raise _untrusted(plain, where)


def is_import_path(name: str) -> bool:
    """Tell whether a name is written as an import path, ``package.module:Name``."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(p.isidentifier() for p in (*module.split("."), *attribute.split(".")))


def import_object(path: str) -> Any:
    """Import ``package.module:Name``; the current folder is searched too, as for `python -m`."""
    module, _, attribute = path.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    value: Any = None
    try:
        value = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        close = None if value is None else nearest(part, [name for name in dir(value) if not name.startswith("_")])
        hint = f"; did you mean {close!r}?" if close else ""
        raise UsageError(f"cannot import {path!r}: {error}{hint}") from error
    return value


def import_path(value: object) -> str:
    """Return the import path of a class or function, for a configuration file."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None or "<" in name:
        raise UsageError(f"{value!r} has no import path; define it at the top of a module to use it in a run")
    return f"{module}:{name}"


def _untrusted(name: object, where: str) -> UsageError:
    return UsageError(
        f"{where} names code to import, {name!r}; pass --trust (in Python, trust=True) if you trust where it came from"
    )


def require_component(owner: object, base: type, **values: object) -> None:
    """Check that each given value is a component of a kind (None passes)."""
    for name, value in values.items():
        if value is not None and not isinstance(value, base):
            kinds = ", ".join(sorted(known(base)))
            raise UsageError(f"{type(owner).__name__}: {name} must be of kind {base.__name__} ({kinds}), got {value!r}")


def find(base: type[T], name: str, *, trust: bool = True, where: str = "the file") -> type[T] | Callable[..., Any]:
    """Return the component class that `name` means: a class name in any spelling, or an import path."""
    if is_import_path(name):
        if not trust:
            raise _untrusted(name, where)
        return typing.cast("type[T]", import_object(name))
    choices = known(base)
    by_folded = {_fold(key): cls for key, cls in choices.items()}
    if _fold(name) not in by_folded:
        raise unknown(base.__name__, name, choices)
    return by_folded[_fold(name)]


def to_plain(value: Any) -> Any:
    """Turn a component tree into mappings, lists and scalars that YAML and JSON can hold."""
    if isinstance(value, Component) and dataclasses.is_dataclass(value):
        cls = type(value)
        name = cls.__name__ if Component._known.get(_fold(cls.__name__)) is cls else import_path(cls)
        fields = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"type": name, **fields}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    # numpy's numbers and subclasses have no YAML form of their own
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        return import_path(value)
    raise UsageError(f"{value!r} cannot be written to a configuration file")


def from_plain(plain: Any, expected: Any, *, where: str = "config", trust: bool = False) -> Any:
    """Build the value of type `expected` that `to_plain` wrote, checking every field."""
    origin = typing.get_origin(expected)
    if expected is Any:
        return plain
    if origin in (typing.Union, types.UnionType):
        return _from_union(plain, typing.get_args(expected), where, trust)
    if origin is typing.Literal:
        if plain not in typing.get_args(expected):
            raise unknown(where, plain, [str(a) for a in typing.get_args(expected)])
        return plain
    if origin is tuple:
        return _from_sequence(plain, typing.get_args(expected), where, trust)
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(plain, Mapping):
            raise UsageError(f"{where}: expected a mapping, got {plain!r}")
        item = typing.get_args(expected)[1]
        return {str(k): from_plain(v, item, where=f"{where}.{k}", trust=trust) for k, v in plain.items()}
    if isinstance(expected, type) and issubclass(expected, Component):
        return _from_component(plain, expected, where, trust)
    return _from_scalar(plain, expected, where)


def _from_union(plain: Any, choices: tuple[Any, ...], where: str, trust: bool) -> Any:
    if plain is None and type(None) in choices:
        return None
    tried = [choice for choice in choices if choice is not type(None)]
    if not isinstance(plain, (list, tuple)):  # who gave one value is not told that a list would do as well
        tried = [choice for choice in tried if typing.get_origin(choice) is not tuple] or tried
    errors = []
    for choice in tried:
        try:
            return from_plain(plain, choice, where=where, trust=trust)
        except UsageError as error:
            errors.append(error)
    # a mapping was meant for a component: its own error says more than that of the scalar alternatives
    raise max(errors, key=lambda error: len(str(error)))


def _from_sequence(plain: Any, items: tuple[Any, ...], where: str, trust: bool) -> tuple[Any, ...]:
    if not isinstance(plain, (list, tuple)):
        raise UsageError(f"{where}: expected a list, got {plain!r}")
    hints = [items[0]] * len(plain) if len(items) == 2 and items[1] is Ellipsis else list(items)
    if len(hints) != len(plain):
        raise UsageError(f"{where}: expected {len(hints)} values, got {len(plain)}: {plain!r}")
    return tuple(
        from_plain(value, hint, where=f"{where}[{i}]", trust=trust)
        for i, (value, hint) in enumerate(zip(plain, hints, strict=True))
    )


def _from_component(plain: Any, expected: type[Component], where: str, trust: bool) -> Any:
    if isinstance(plain, str):
        plain = {"type": plain}
    if not isinstance(plain, Mapping):
        raise UsageError(f"{where}: expected a {expected.__name__} (a name, or a mapping with `type`), got {plain!r}")
    values = dict(plain)
    concrete = dataclasses.is_dataclass(expected) and not getattr(expected, "__abstractmethods__", None)
    if "type" not in values and concrete:
        cls: Any = expected
    else:
        name = values.pop("type", expected.__name__)
        if not isinstance(name, str):
            raise UsageError(f"{where}.type: expected a name, got {name!r}")
        cls = find(expected, name, trust=trust, where=f"{where}.type")
        wrap = getattr(expected, "from_function", None)
        if wrap is not None and callable(cls) and not isinstance(cls, type) and not values:
            return wrap(name)  # a plain function of the user's
    if not (isinstance(cls, type) and issubclass(cls, Component) and dataclasses.is_dataclass(cls)):
        raise UsageError(f"{where}: {cls!r} is not a component class (a frozen dataclass derived from Component)")
    if not issubclass(cls, expected):
        raise UsageError(f"{where}: expected a {expected.__name__}, got the {cls.__name__} of {cls.__module__}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}
    if not trust:
        _refuse_marked(cls, values, where)
    arguments = {}
    for key, value in values.items():
        if key not in fields:
            raise unknown(f"option of {cls.__name__} at {where}", key, fields)
        arguments[key] = from_plain(value, fields[key], where=f"{where}.{key}", trust=trust)
    try:
        return cls(**arguments)
    except TypeError as error:
        raise UsageError(f"{where}: {cls.__name__} {str(error).partition('() ')[2] or error}") from error


def _refuse_marked(cls: Any, values: Mapping[str, Any], where: str) -> None:
    """Raise where a field that names code is set, or one that may name code does."""
    for field in dataclasses.fields(cls):
        if field.name in values and field.metadata.get("code"):
            raise _untrusted(values[field.name], f"{where}.{field.name}")
        if field.name in values and field.metadata.get("code inside"):
            refuse_code(values[field.name], f"{where}.{field.name}")


def _from_scalar(plain: Any, expected: Any, where: str) -> Any:
    if expected is float and isinstance(plain, (int, float)) and not isinstance(plain, bool):
        try:
            number = float(plain)
        except OverflowError:  # a whole number of more than 308 digits
            raise UsageError(f"{where}: expected a number, got one too large to hold") from None
        if math.isnan(number):
            raise UsageError(f"{where}: expected a number, got nan")
        return number
    if expected is Path and isinstance(plain, str):
        return Path(plain)
    if isinstance(expected, type) and isinstance(plain, expected) and (expected is bool or not isinstance(plain, bool)):
        return plain
    raise UsageError(f"{where}: expected {getattr(expected, '__name__', expected)}, got {plain!r}")


def dump_yaml(value: Any) -> str:
    """Write a component tree as YAML."""
    return yaml.safe_dump(to_plain(value), sort_keys=False, allow_unicode=True)


def parse_yaml(text: str, where: str = "config") -> Any:
    """Read YAML safely: plain values only, with one clear line for what cannot be read."""
    if len(text) > MAX_TEXT:
        raise UsageError(f"{where}: not a configuration: it has {len(text)} characters, more than {MAX_TEXT}")
    try:
        plain = yaml.load(text, _Loader)  # a safe loader: it builds plain values only
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = str(error).replace("\n", " ")
        raise UsageError(f"{where}: not valid YAML: {line}") from error
    _check_size(plain, where)
    return plain


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-3 is a number, as everywhere else (YAML 1.1 asks for 1.0e-3 and reads a string)."""


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+|[0-9]*\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def _check_size(plain: Any, where: str) -> None:
    """Refuse values that contain themselves or, by aliases of aliases, grow beyond any configuration written out."""
    seen, level = 0, [plain]
    for _ in range(MAX_DEPTH):
        seen += len(level)
        if not level or seen > MAX_NODES:
            break
        below: list[Any] = []
        for value in level:
            if isinstance(value, (Mapping, list)) and len(below) <= MAX_NODES:
                below.extend(value.values() if isinstance(value, Mapping) else value)
        level = below
    if level:
        raise UsageError(f"{where}: not a configuration: it is nested too deeply, or its aliases write out too long")


def load_yaml(text: str, expected: type[T], *, where: str = "config", trust: bool = False) -> T:
    """Read the component tree that `dump_yaml` wrote."""
    return typing.cast("T", from_plain(parse_yaml(text, where), expected, where=where, trust=trust))
