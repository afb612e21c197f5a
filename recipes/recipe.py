"""Recipes: what to do to a model, as data.

A recipe is a YAML file of formats and of limits that the finished engine must keep. Loading resolves `extends`, then
the `--set` overrides, then checks every key and value. The result is a tree of frozen dataclasses.

    extends: int4                                       # a recipe's name, or a path relative to this file
    overrides:                                          # the last pattern that matches a module decides
      - {match: "model.layers.0.*", weight: int8}

Merging: mappings merge key by key; anything else, lists too, is replaced by the newer value.
This file imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from enginewright.recipes.errors import InputError, near_matches

__all__ = [
    "ACTIVATION_OF",
    "KV_FORMATS",
    "WEIGHT_FORMATS",
    "ModuleFormat",
    "Override",
    "Recipe",
    "Verify",
    "list_recipes",
    "load_recipe",
]

ACTIVATION_OF = {
    "f32": "f32",
    "bf16": "bf16",
    "int8": "int8_g32",
    "int8_g32": "int8_g32",
    "int4_g32": "int8_g32",
    "int4_g64": "int8_g64",
    "int4_g128": "int8_g128",
}
"""Weight format -> the activation format its products use. Integer weights meet int8 activations, rounded per
token and per group; the group equals the weight's. Weights with one scale a channel take groups of 32: on SmolLM2 groups of 64
cost a third more KL divergence (0.0085 against 0.0065 nats)."""

WEIGHT_FORMATS = (*ACTIVATION_OF, "keep")
"""What `weight:` accepts. `keep` carries the integers of an already quantised file unchanged."""

KV_FORMATS = ("f32", "bf16", "int8")
_ACTIVATIONS = ("auto", "f32", "bf16", "int8")


# --- values and their checks: each takes (value, dotted key) and returns the value, or raises InputError


def _bad(key: str, value: object, expected: str, action: str | None = None) -> InputError:
    shown = "null" if value is None else repr(value)
    return InputError(
        f"recipe key '{key}' has a value that cannot be used", found=shown, expected=expected, action=action
    )


def _one_of(*choices: object) -> Callable[[Any, str], Any]:
    def check(value: Any, key: str) -> Any:
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
        names = [str(choice) for choice in choices]
        near = [name for name in names if name.startswith(f"{value}_")] or near_matches(str(value), names, 1)
        action = f"did you mean {' or '.join(near)}?" if near else None
        raise _bad(key, value, "one of " + ", ".join(names), action)

    return check


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise _bad(key, value, "text")
    return value


def _optional_count(value: Any, key: str) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise _bad(key, value, "a whole number above 0, or null")


def _limit(value: Any, key: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    raise _bad(key, value, "a number, 0 or more, or null for no limit")


def _share(value: Any, key: str) -> float | None:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1):
        return value if value is None else float(value)
    raise _bad(key, value, "a number from 0 to 1, or null for no limit")


def _by(check: Callable[[Any, str], Any]) -> dict[str, Any]:
    return {"check": check}


_weight = _one_of(*WEIGHT_FORMATS)
_activation = _one_of(*_ACTIVATIONS)


@dataclass(frozen=True)
class Linear:
    """Matrices that activations are multiplied by. Activation `auto` is whatever goes with the weight."""

    weight: str = field(metadata=_by(_weight))
    activation: str = field(default="auto", metadata=_by(_activation))


@dataclass(frozen=True)
class Embedding:
    """The token table (rows are looked up, nothing is multiplied)."""

    weight: str = field(metadata=_by(_weight))


@dataclass(frozen=True)
class KvCache:
    format: str = field(metadata=_by(_one_of(*KV_FORMATS)))
    page_size: int = field(default=16, metadata=_by(_one_of(16, 32)))


@dataclass(frozen=True)
class Quantise:
    """How real weights become integers. `range` chooses each group's end points: its own minimum and maximum,
    or those shrunk by whichever of a few factors gives the least squared error."""

    method: str = field(default="rtn", metadata=_by(_one_of("rtn")))
    range: str = field(default="minmax", metadata=_by(_one_of("minmax", "mse")))


@dataclass(frozen=True)
class Override:
    """Another format for the modules whose checkpoint name matches a glob (`*` crosses dots)."""

    match: str = field(metadata=_by(_text))
    weight: str = field(metadata=_by(_weight))
    activation: str = field(default="auto", metadata=_by(_activation))


@dataclass(frozen=True)
class Verify:
    """Limits on the finished engine against the source model in fp32; null sets no limit.

    max_logit_error: largest |logit difference| as a share of the largest |logit|. max_kl: mean KL divergence a token,
    nats. min_top1: share of positions with the same best token. max_perplexity_ratio: engine's perplexity over the source's.
    """

    max_logit_error: float | None = field(default=None, metadata=_by(_limit))
    max_kl: float | None = field(default=None, metadata=_by(_limit))
    min_top1: float | None = field(default=None, metadata=_by(_share))
    max_perplexity_ratio: float | None = field(default=None, metadata=_by(_limit))


@dataclass(frozen=True)
class ModuleFormat:
    """What one module gets: a weight format, and the activation format of its product."""

    weight: str
    activation: str


def _section(cls: type) -> Callable[[Any, str], Any]:
    return lambda value, key: _parse(cls, value, key)


def _overrides(value: Any, key: str) -> tuple[Override, ...]:
    if not isinstance(value, list):
        raise _bad(key, value, "a list of {match, weight, activation}")
    return tuple(_parse(Override, item, f"{key}.{index}") for index, item in enumerate(value))


@dataclass(frozen=True)
class Recipe:
    """One resolved recipe. `router` is the linear that scores experts: small, and wrong choices cost much."""

    name: str = field(metadata=_by(_text))
    linear: Linear = field(metadata=_by(_section(Linear)))
    embedding: Embedding = field(metadata=_by(_section(Embedding)))
    head: Linear = field(metadata=_by(_section(Linear)))
    kv_cache: KvCache = field(metadata=_by(_section(KvCache)))
    description: str = field(default="", metadata=_by(_text))
    router: Linear = field(default=Linear("f32"), metadata=_by(_section(Linear)))
    quantise: Quantise = field(default=Quantise(), metadata=_by(_section(Quantise)))
    max_context: int | None = field(default=None, metadata=_by(_optional_count))
    overrides: tuple[Override, ...] = field(default=(), metadata=_by(_overrides))
    verify: Verify = field(default=Verify(), metadata=_by(_section(Verify)))

    def resolved(self) -> dict[str, Any]:
        """Return the recipe as plain data (dicts, lists, text, numbers, null), every default written out."""
        plain = dataclasses.asdict(self)
        plain["overrides"] = [dict(item) for item in plain["overrides"]]
        for section in (plain["linear"], plain["head"], plain["router"], *plain["overrides"]):
            section["activation"] = ACTIVATION_OF.get(section["weight"], "auto")
        return plain

    def assign(self, modules: Mapping[str, str]) -> dict[str, ModuleFormat]:
        """Give each module its formats.

        `modules` maps checkpoint module names to roles: 'linear', 'embedding', 'head' or 'router'. The last
        override that matches decides. Raises InputError when a pattern matches no module, with names like it.
        """
        base = {"linear": self.linear.weight, "embedding": self.embedding.weight}
        base |= {"head": self.head.weight, "router": self.router.weight}
        chosen = {name: base[role] for name, role in modules.items()}
        for index, override in enumerate(self.overrides):
            matched = [name for name in modules if fnmatchcase(name, override.match)]
            if not matched:
                raise _unmatched(index, override.match, modules)
            chosen.update(dict.fromkeys(matched, override.weight))
        return {
            name: ModuleFormat(weight, ACTIVATION_OF.get(weight, "auto")) for name, weight in chosen.items()
        }


def _unmatched(index: int, pattern: str, modules: Iterable[str]) -> InputError:
    names = list(modules)
    stem = pattern.replace("*", "").strip(".")
    near = near_matches(pattern, names) or [name for name in names if stem and stem in name][:3]
    leaves = near_matches(pattern.rsplit(".", 1)[-1], {name.rsplit(".", 1)[-1] for name in names})
    near = near or [next(name for name in names if name.endswith(leaf)) for leaf in leaves] or names[:3]
    return InputError(
        f"recipe key 'overrides.{index}.match' names no module of this model",
        found=repr(pattern),
        expected=f"a pattern that matches at least one of {len(names)} modules, such as " + ", ".join(near),
        action="correct the pattern, or remove the override",
    )


def _parse(cls: type, value: Any, key: str) -> Any:
    """Turn a mapping into dataclass `cls`, checking every key and value; `key` is the dotted path so far."""
    inner = f"{key}." if key else ""
    fields = {item.name: item for item in dataclasses.fields(cls)}
    if not isinstance(value, dict):
        raise _bad(key or "(the file)", value, "a mapping with the keys " + ", ".join(fields))
    for name in value:
        if name not in fields:
            near = near_matches(str(name), fields, 1)
            raise InputError(
                f"unknown recipe key '{inner}{name}'",
                expected="one of " + ", ".join(inner + other for other in fields),
                action=f"did you mean '{inner}{near[0]}'?" if near else None,
            )
    missing = [
        name
        for name, item in fields.items()
        if name not in value
        and item.default is dataclasses.MISSING
        and item.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InputError(
            f"recipe key '{inner}{missing[0]}' is missing",
            action="give it, or name a recipe to build on with 'extends'",
        )
    parsed = cls(**{name: fields[name].metadata["check"](item, inner + name) for name, item in value.items()})
    if hasattr(parsed, "activation"):
        _check_pair(parsed.weight, parsed.activation, inner)
    return parsed


def _check_pair(weight: str, activation: str, inner: str) -> None:
    """Refuse an activation format that no kernel multiplies with this weight format."""
    fits = "int8" if weight == "keep" else ACTIVATION_OF[weight].split("_")[0]
    if activation not in ("auto", fits):
        raise InputError(
            f"recipe keys '{inner}weight' and '{inner}activation' do not go together",
            found=f"weight {weight}, activation {activation}",
            expected=f"activation {fits} (or auto) with weight {weight}",
            action=f"set {inner}activation=auto, or choose another {inner}weight",
        )


# --- reading


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
    files = sorted(Path(__file__).parent.glob("*.yaml"))
    return {file.stem: " ".join(str(_read_file(file).get("description", "")).split()) for file in files}


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe by name or from a YAML file, apply overrides (`a.b=value`, `list+=item`) and check it.

    Values are YAML: `true`, `null`, `3`, `[a, b]`, `{match: "*.down_proj", weight: int8}`. A number in a
    dotted key picks an item of a list. Raises InputError with the key, the value, what is allowed and near.
    """
    data: dict[str, Any] = {"overrides": []} | _load_tree(_find(str(name_or_path), None), ())
    for override in overrides:
        _apply(data, override)
    return _parse(Recipe, data, "")


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
        raise _bad("extends", parent, "the name or path of one recipe")
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
