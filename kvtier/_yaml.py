# SPDX-License-Identifier: Apache-2.0
"""YAML as people expect it: the 1.2 core schema, no key twice, errors with their line.

PyYAML reads YAML 1.1, where ``off`` is False, ``1:30`` is 90, ``010`` is 8 and ``1e9`` is text; in
a configuration each of these is a trap. Owns no state.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from kvtier.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2, which refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} stands twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


# A table of its own: the inherited one is shared with every other user of PyYAML.
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}",
        re.compile(f"^(?:{_pattern})$"),
        [*_first, ""] if _tag == "null" else list(_first),
    )


def load_yaml(path: Path) -> Any:
    """Contents of the YAML file at `path`.

    Raises
    ------
    ConfigError
        If it cannot be read or is no YAML; the message names the path and the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as exc:
        raise ConfigError(f"{path}: there is no such file") from exc
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {exc.start})") from exc
    except ValueError as exc:
        # A zero byte, or half of a surrogate pair.
        raise ConfigError(f"{str(path)!r}: no file can have this name") from exc
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Any:
    """Value of one YAML document; `source` names it in errors.

    Raises
    ------
    ConfigError
    """
    try:
        value = yaml.load(text, _Loader)  # a SafeLoader: it builds plain values only
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        where = f"{source}:{mark.line + 1}" if mark is not None else source
        raise ConfigError(f"{where}: {exc.problem or exc.context or 'is no YAML'}") from exc
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        # ValueError: a number too long for int(); RecursionError: nested a thousand deep.
        raise ConfigError(f"{source}: is no YAML: {exc}") from exc
    if value is None:
        raise ConfigError(f"{source}: is empty; it needs at least capacity_bytes")
    return value
