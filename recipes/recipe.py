"""Recipes: what to do to a model, as data.

A recipe is a YAML file of formats and of limits that the finished engine must keep. Loading resolves `extends`, then
the `--set` overrides, then checks every key and value (schema.py). The result is a tree of frozen dataclasses.

    extends: int4                                       # a recipe's name, or a path relative to this file
    overrides:                                          # the last pattern that matches a module decides
      - {match: "model.layers.0.*", weight: int8}

Merging: mappings merge key by key; anything else, lists too, is replaced by the newer value.
This file imports neither torch nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from enginewright.recipes.errors import InputError, near_matches
from enginewright.recipes.schema import (
    Calibration,
    Draft,
    Mixed,
    ModuleFormat,
    Outliers,
    Override,
    Quantise,
    Recipe,
    Smooth,
    Verify,
    check_together,
    parse,
)
from enginewright.recipes.values import unusable

__all__ = [
    "Calibration",
    "Draft",
    "Mixed",
    "ModuleFormat",
    "Outliers",
    "Override",
    "Quantise",
    "Recipe",
    "Smooth",
    "Verify",
    "list_recipes",
    "load_recipe",
]


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-3 is a number, yes/no are text, a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for index, key in enumerate(keys) if key in keys[:index]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(
                None, None, f"key '{twice}' is given twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if not tag.endswith((":bool", ":float", ":timestamp"))]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("^(?:true|True|false|False)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?$|^[-+]?\.(?:inf|Inf)$|^\.(?:nan|NaN)$"
    ),
    list("-+.0123456789"),
)


def _read_yaml(text: str, what: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, TypeError, RecursionError) as error:
        raise InputError(f"{what} is not valid YAML", found=" ".join(str(error).split())) from error


def list_recipes() -> dict[str, str]:
    """Return the recipes that come with enginewright: name -> one-line description, sorted by name."""
    files = sorted(Path(__file__).parent.glob("*.yaml"), key=lambda file: file.stem)
    return {file.stem: " ".join(str(_read_file(file).get("description", "")).split()) for file in files}


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe by name or from a YAML file, apply overrides (`a.b=value`, `list+=item`) and check it.

    Values are YAML: `true`, `null`, `3`, `[a, b]`, `{match: "*.down_proj", weight: int8}`. A number in a
    dotted key picks an item of a list. Raises InputError with the key, the value, what is allowed and near.
    """
    data: dict[str, Any] = {"overrides": []} | _load_tree(_find(str(name_or_path), None), ())
    for override in overrides:
        _apply(data, override)
    recipe = parse(Recipe, data, "")
    check_together(recipe)
    return recipe


def _find(reference: str, base: Path | None) -> Path:
    """Locate a recipe: a name that comes with enginewright, or a path (relative to the folder `base`)."""
    if "/" in reference or reference.endswith((".yaml", ".yml")):
        path = (base or Path()) / Path(reference).expanduser()
        if not path.is_file():
            raise InputError(
                f"no recipe file at {path}", action="give a YAML file, or one of: " + ", ".join(_names())
            )
        return path
    path = Path(__file__).parent / f"{reference}.yaml"
    if not path.is_file():
        near = near_matches(reference, _names(), 1)
        raise InputError(
            f"unknown recipe '{reference}'",
            expected="one of " + ", ".join(_names()) + ", or the path of a YAML file",
            action=f"did you mean '{near[0]}'?" if near else None,
        )
    return path


def _names() -> list[str]:
    return sorted(file.stem for file in Path(__file__).parent.glob("*.yaml"))


def _read_file(path: Path) -> dict[str, Any]:
    try:
        data = _read_yaml(path.read_text(encoding="utf-8"), f"recipe {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"recipe {path} cannot be read", found=str(error)) from error
    if not isinstance(data, dict):
        raise InputError(f"recipe {path} is not a mapping of keys", found=type(data).__name__)
    return data


def _load_tree(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        chain = " -> ".join(item.stem for item in (*seen, path))
        raise InputError("recipes extend each other in a circle", found=chain, action="remove one 'extends'")
    data = _read_file(path)
    parent = data.pop("extends", None)
    if parent is None:
        merged = data
    elif isinstance(parent, str):
        merged = _merge(_load_tree(_find(parent, path.parent), (*seen, path)), data)
    else:
        raise unusable("extends", parent, "the name or path of one recipe")
    merged["name"] = data.get("name", path.stem)
    return merged


def _merge(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: _merge(old.get(key), value) for key, value in new.items()}
    return new


def _apply(data: dict[str, Any], override: str) -> None:
    """Set one dotted key in place. Keys are checked later, with the whole recipe."""
    found = re.match(r"^\s*([\w.]+)\s*(\+?=)(.*)$", override, re.DOTALL)
    if not found:
        raise InputError(
            f"override '{override}' cannot be read", expected="KEY=VALUE, such as linear.weight=int8"
        )
    key, operator, text = found.groups()
    value = _read_yaml(text.strip() or "null", f"the value of override '{key}'")
    *parents, last = key.split(".")
    target: Any = data
    for index, part in enumerate(parents):
        target = _descend(target, part, ".".join(parents[: index + 1]))
    if operator == "+=":
        items = _descend(target, last, key, make=list)
        if not isinstance(items, list):
            raise InputError(
                f"override '{override}' appends to '{key}', which is not a list", action=f"use {key}=…"
            )
        items.append(value)
    elif isinstance(target, list):
        target[_index(target, last, key)] = value
    else:
        target[last] = value


def _descend(target: Any, part: str, key: str, make: type = dict) -> Any:
    if isinstance(target, list):
        return target[_index(target, part, key)]
    inner = target.setdefault(part, make())
    if not isinstance(inner, (dict, list)):
        raise InputError(f"recipe key '{key}' has no keys inside it", found=repr(inner))
    return inner


def _index(items: list[Any], part: str, key: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        count = f"0 to {len(items) - 1}" if items else "no item: the list is empty (append with +=)"
        raise InputError(f"recipe key '{key}' names no item of the list", found=part, expected=count)
    return int(part)
