# SPDX-License-Identifier: Apache-2.0
"""Strict decoding of plain mappings into frozen msgspec structs, with errors a person can act on.

Owns no state and runs on any thread. ``kvtier.config`` uses it for the common keys, each tier for
its own. Every error is a ConfigError that names the path, the value, and what to write instead;
values under a secret's path are never shown.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from kvtier.errors import ConfigError

_MARK = "kvtier"

MAX_BYTES = 2**63 - 1

Bytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES, extra={_MARK: "bytes"})]
"""A size: a whole number of bytes, or text such as ``100GiB``, ``5GB``, ``512 KiB``."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9, extra={_MARK: "seconds"})]
"""A time above zero."""
SecondsOrZero = Annotated[float, msgspec.Meta(ge=0, le=1e9, extra={_MARK: "seconds"})]
Directory = Annotated[str, msgspec.Meta(min_length=1, extra={_MARK: "directory"})]
"""Path of a directory."""
Ratio = Annotated[float, msgspec.Meta(gt=0, le=1)]
"""A share, above 0 and at most 1."""
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]

UNITS: Mapping[str, int] = types.MappingProxyType(
    {
        "B": 1,
        "kB": 10**3,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "PB": 10**15,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
        "PiB": 2**50,
    }
)
"""Units of a size. Case counts: ``Gb`` could be meant as bits, ``G`` and ``m`` as anything."""

_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)", re.ASCII)
_VARIABLE = re.compile(r"\$\{([^{}]*)\}")
_REFERENCE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.ASCII | re.DOTALL)
_SECRET_NAME = re.compile(
    r"secret|passw|passphrase|credential|(?:^|_)(?:token|auth)$|(?:access|private|api)_?key", re.I
)

StructT = TypeVar("StructT", bound=msgspec.Struct)


class Secret:
    """Text that is shown to nobody: repr, str and format give ``***``.

    ``reveal`` gives the text; call it where the secret is used, and keep no copy.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself."""
        return self._text

    def __repr__(self) -> str:
        return "Secret('***')"

    def __str__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> typing.NoReturn:
        raise TypeError("a Secret is not serialised; send the ${VARIABLE} it came from")


def looks_secret(name: str) -> bool:
    """Whether a key of this name holds a secret, where no struct says so."""
    return _SECRET_NAME.search(name) is not None


def is_reference(value: object) -> bool:
    """Whether `value` names an environment variable instead of giving the text itself."""
    return isinstance(value, str) and _VARIABLE.search(value) is not None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be, or None."""
    choices = list(known)
    folded = {choice.lower().replace("-", "_"): choice for choice in choices}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), folded, n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def parse_bytes(value: object, path: str) -> int:
    """Number of bytes that `value` means.

    Parameters
    ----------
    value : int, float with a whole value, or text
        ``5GB`` is 5 * 10**9 bytes, ``5GiB`` is 5 * 2**30; a space before the unit is allowed.
    path : str
        Where it stands, for the error.

    Raises
    ------
    ConfigError
        If it is no size, or not a whole number of bytes from 1 to 2**63 - 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _wrong(path, value, _SIZE_WANTED)
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise _wrong(path, value, _SIZE_WANTED)
        digits, unit = match.group(1), match.group(2)
        if unit and unit not in UNITS:
            upper = {name.upper(): name for name in UNITS}
            known = upper.get(unit.upper()) or upper.get(f"{unit}iB".upper())
            hint = f"did you mean {digits}{known}?" if known else f"units are {', '.join(UNITS)}"
            raise ConfigError(f"{path}: {value!r} has the unknown unit {unit!r}; {hint}")
        whole, _, fraction = digits.partition(".")
        scale: int = 10 ** len(fraction)
        number, rest = divmod(int(whole + fraction) * UNITS[unit or "B"], scale)
        if rest:
            raise _wrong(path, value, _SIZE_WANTED)
    else:
        if isinstance(value, float) and (not math.isfinite(value) or value != int(value)):
            raise _wrong(path, value, _SIZE_WANTED)
        number = int(value)
    if not 1 <= number <= MAX_BYTES:
        raise _wrong(path, value, _SIZE_WANTED)
    return number


def format_bytes(number: int) -> str:
    """`number` in the largest binary unit that gives a whole number; ``parse_bytes`` reads it."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if number and number % UNITS[unit] == 0:
            return f"{number // UNITS[unit]}{unit}"
    return str(number)


def expand(text: str, path: str, environ: Mapping[str, str] | None = None) -> str:
    """`text` with each ``${NAME}`` and ``${NAME:-default}`` replaced.

    As in a shell, a variable that is set but empty counts as unset.

    Raises
    ------
    ConfigError
        If a variable is unset and has no default, or a reference is malformed. The message names
        the variable and never the text.
    """
    variables = os.environ if environ is None else environ

    def replace(match: re.Match[str]) -> str:
        reference = _REFERENCE.fullmatch(match.group(1))
        if reference is None:
            raise ConfigError(f"{path}: a variable is written ${{NAME}} or ${{NAME:-default}}")
        name, default = reference.group(1), reference.group(2)
        value = variables.get(name) or default
        if not value:
            raise ConfigError(
                f"{path}: the environment variable {name} is not set; "
                f"export {name}, or write ${{{name}:-default}}"
            )
        return value

    if "${" in _VARIABLE.sub("", text):
        raise ConfigError(f"{path}: '${{' without '}}'; a variable is written ${{NAME}}")
    return _VARIABLE.sub(replace, text)


def unknown_key(path: str, key: object, known: Iterable[str]) -> ConfigError:
    """The error for a key that nobody reads: its path, the nearest known key, and all of them."""
    names = sorted(known)
    where = join(path, str(key))
    if not isinstance(key, str):
        return ConfigError(f"{where}: keys are text, got {key!r}; put it in quotes")
    close = nearest(key, names)
    hint = f"did you mean {close!r}? " if close else ""
    return ConfigError(f"{where}: unknown key {key!r}; {hint}Known keys: {', '.join(names)}")


def join(path: str, key: str) -> str:
    """Path of `key` inside the mapping at `path`."""
    return f"{path}.{key}" if path else key


def decode_options(
    struct_type: type[StructT],
    data: object,
    path: str,
    *,
    environ: Mapping[str, str] | None = None,
    also_known: Iterable[str] = (),
) -> StructT:
    """Decode a mapping into `struct_type`, refusing whatever does not fit.

    Parameters
    ----------
    struct_type : type
        msgspec struct. Fields may be scalars with ``msgspec.Meta`` bounds, ``Literal``, `Bytes`,
        `Secret`, structs, tuples and dicts of these, and unions of one of these with None.
        A ``ValueError`` from its ``__post_init__`` becomes a ConfigError at `path`.
    data : Mapping
        Keys are the struct's field names.
    path : str
        Where the mapping stands, such as ``tiers[1]``; '' is the top.
    environ : Mapping, optional
        Variables for secrets; the process's environment by default.
    also_known : iterable of str
        Further names that a misspelt key may have been meant as.

    Raises
    ------
    ConfigError
    """
    if not isinstance(data, Mapping):
        raise _wrong(path or "configuration", data, "a mapping of keys to values")
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct_type)}
    for key in data:
        if key not in fields:
            raise unknown_key(path, key, {*fields, *also_known})
    values: dict[str, Any] = {}
    for key, field in fields.items():
        if key in data:
            values[field.name] = _convert(field.type, data[key], join(path, key), environ)
        elif field.required:
            raise ConfigError(f"{join(path, key)}: is missing; give {_wanted(field.type)}")
    try:
        return struct_type(**values)
    except ValueError as exc:
        raise ConfigError(f"{path or 'configuration'}: {exc}") from exc


def is_bytes(kind: Any) -> bool:
    """Whether a field's type is `Bytes` or ``Bytes | None``."""
    return _mark(kind) == "bytes"


def _convert(kind: Any, value: object, path: str, environ: Mapping[str, str] | None) -> Any:
    members = _members(kind)
    if value is None and type(None) in members:
        return None
    members = [member for member in members if member is not type(None)]
    if len(members) > 1:
        # A union of plain kinds (text or mapping): its member is chosen by the value's own type.
        return _plain(kind, value, path)
    (member,) = members
    if _mark(member) == "bytes":
        return parse_bytes(value, path)
    if member is Secret:
        return _secret(value, path, environ)
    if isinstance(member, type) and issubclass(member, msgspec.Struct):
        return decode_options(member, value, path, environ=environ)
    origin, args = typing.get_origin(member), typing.get_args(member)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        if not isinstance(value, list | tuple):
            raise _wrong(path, value, _wanted(member))
        return tuple(
            _convert(args[0], item, f"{path}[{index}]", environ) for index, item in enumerate(value)
        )
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _wrong(path, value, _wanted(member))
        for key in value:
            if not isinstance(key, str) or not key:
                raise ConfigError(f"{path}: keys are text, got {key!r}; put it in quotes")
        return {
            key: _convert(args[1], item, join(path, key), environ) for key, item in value.items()
        }
    return _plain(member, value, path)


def _plain(kind: Any, value: object, path: str) -> Any:
    if kind is Any:
        return value
    if isinstance(value, str):
        if not value.strip():
            raise ConfigError(f"{path}: is empty; give {_wanted(kind)}, or leave the key out")
        if is_reference(value):
            raise ConfigError(
                f"{path}: {value!r}: variables are expanded in secrets only; write the value"
            )
        if "\0" in value or any("\ud800" <= one <= "\udfff" for one in value):
            raise ConfigError(f"{path}: {value!r:.80} has a character that no file or message can")
        if _mark(kind) == "directory" and value.startswith("~"):
            raise ConfigError(f"{path}: {value!r:.80}: ~ is not expanded; write the whole path")
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as exc:
        raise _wrong(path, value, _wanted(kind)) from exc


def _secret(value: object, path: str, environ: Mapping[str, str] | None) -> Secret:
    # The value is in no message: whatever stands at this path may be the secret itself.
    if not isinstance(value, str):
        raise ConfigError(f"{path}: a secret is text; write it as ${{VARIABLE}}")
    if not value.strip():
        raise ConfigError(f"{path}: is empty; write it as ${{VARIABLE}}, or leave the key out")
    return Secret(expand(value, path, environ))


def _members(kind: Any) -> list[Any]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return list(typing.get_args(kind))
    return [kind]


def _mark(kind: Any) -> str | None:
    for member in _members(kind):
        for meta in typing.get_args(member)[1:] if typing.get_origin(member) is Annotated else ():
            if isinstance(meta, msgspec.Meta) and meta.extra and _MARK in meta.extra:
                return str(meta.extra[_MARK])
    return None


_SIZE_WANTED = "a size of at least 1 byte, such as 100GiB, 512KiB, 5GB or 1073741824"


def _wanted(kind: Any) -> str:
    """What to type for a value of this kind."""
    members = _members(kind)
    texts = [_wanted_one(member) for member in members if member is not type(None)]
    return " or ".join([*texts, "nothing (null)"] if type(None) in members else texts)


def _wanted_one(kind: Any) -> str:
    metas: tuple[Any, ...] = ()
    mark = _mark(kind)
    if typing.get_origin(kind) is Annotated:
        kind, *rest = typing.get_args(kind)
        metas = tuple(meta for meta in rest if isinstance(meta, msgspec.Meta))
    origin = typing.get_origin(kind)
    if mark == "bytes":
        return _SIZE_WANTED
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(kind))
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        noun = "a number" if kind is float else "a whole number"
        return (f"{noun} of seconds" if mark == "seconds" else noun) + _bounds(metas)
    if kind is str:
        return "text" + "".join(f" matching {meta.pattern}" for meta in metas if meta.pattern)
    if kind is Secret:
        return "a secret, written as ${VARIABLE}"
    if origin in (tuple, list):
        return "a list"
    return "a mapping of keys to values"


def _bounds(metas: tuple[Any, ...]) -> str:
    words = []
    for meta in metas:
        words += [f"above {meta.gt:g}"] if meta.gt is not None else []
        words += [f"of at least {meta.ge:g}"] if meta.ge is not None else []
        words += [f"below {meta.lt:g}"] if meta.lt is not None else []
        words += [f"at most {meta.le:g}"] if meta.le is not None else []
    return "".join(f" {word}" if index == 0 else f" and {word}" for index, word in enumerate(words))


def _wrong(path: str, value: object, wanted: str) -> ConfigError:
    name = path.rpartition(".")[2]
    shown = "***" if looks_secret(name) else repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    hint = ""
    if isinstance(value, str) and wanted.startswith("one of "):
        close = nearest(value, wanted.removeprefix("one of ").split(", "))
        hint = f"; did you mean {close}?" if close else ""
    if value is None:
        return ConfigError(f"{path}: is empty; give {wanted}, or leave the key out")
    return ConfigError(f"{path}: {shown} is not {wanted}{hint}")
