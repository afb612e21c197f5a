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
from enginewright.recipes.formats import (
    ACTIVATION_FORMATS,
    GROUPS,
    KV_FORMATS,
    WEIGHT_FORMATS,
    activations_for,
    default_activation,
    parse_weight,
)

__all__ = [
    "Calibration",
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

_KEEP = "keep"
"""A `weight` that carries the integers of an already quantised file unchanged."""

_WEIGHTS = (*WEIGHT_FORMATS, _KEEP)
_ACTIVATIONS = ("auto", *ACTIVATION_FORMATS)


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


def _weight(value: Any, key: str) -> Any:
    if isinstance(value, str) and value.replace("_g-1", "") in _WEIGHTS:
        return value.replace("_g-1", "")  # as others write one group a row
    near = [name for name in _WEIGHTS if name.startswith(f"{value}_")] or near_matches(
        str(value), _WEIGHTS, 3
    )
    raise _bad(
        key,
        value,
        "f32, bf16, fp8, keep, or int8, uint8, int4, int3, int2, alone or with a group of inputs a scale (_g"
        + ", _g".join(map(str, GROUPS))
        + "), and perhaps _zp",
        f"did you mean {' or '.join(near)}?" if near else None,
    )


_activation = _one_of(*_ACTIVATIONS)


def _count(value: Any, key: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise _bad(key, value, "a whole number above 0")


def _seed(value: Any, key: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    raise _bad(key, value, "a whole number, 0 or more")


def _number(low: float, high: float, optional: bool = False) -> Callable[[Any, str], Any]:
    def check(value: Any, key: str) -> Any:
        if value is None and optional:
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high:
            return float(value)
        raise _bad(key, value, f"a number from {low:g} to {high:g}" + (", or null" if optional else ""))

    return check


def _flag(value: Any, key: str) -> bool:
    if isinstance(value, bool):
        return value
    raise _bad(key, value, "true or false")


def _alpha(value: Any, key: str) -> Any:
    return value if value == "search" else _number(0, 1)(value, key)


def _bits(value: Any, key: str) -> Any:
    """`4.5`, or `4.5 bits`."""
    if isinstance(value, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*bits?\s*", value)):
        value = float(found[1])
    return _number(1, 16, optional=True)(value, key)


def _candidates(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise _bad(key, value, "a list of weight formats")
    found = tuple(_weight(item, f"{key}.{index}") for index, item in enumerate(value))
    if _KEEP in found or len(set(found)) < len(found):
        raise _bad(key, list(value), "different weight formats, without keep")
    return found


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
    """How keys and values are stored. `max_error` (with int8): a layer whose attention output would change by more than this
    share keeps bf16; measured by calibration, null keeps int8 everywhere."""

    format: str = field(metadata=_by(_one_of(*KV_FORMATS)))
    page_size: int = field(default=16, metadata=_by(_one_of(16, 32)))
    max_error: float | None = field(default=None, metadata=_by(_number(0, 1, optional=True)))


@dataclass(frozen=True)
class Calibration:
    """The text that calibrated methods see: `samples` sequences of `length` tokens.

    source: `self` (the model's own bf16 engine writes it), or a file (.txt, .jsonl, .parquet; `text_field` names the text in a
    record). memory: GiB of activations that may be held; beyond it they go to disk.
    """

    source: str = field(default="self", metadata=_by(_text))
    text_field: str = field(default="text", metadata=_by(_text))
    samples: int = field(default=128, metadata=_by(_count))
    length: int = field(default=512, metadata=_by(_count))
    seed: int = field(default=0, metadata=_by(_seed))
    memory: float = field(default=2.0, metadata=_by(_number(0.001, 4096)))


@dataclass(frozen=True)
class Smooth:
    """Scales moved from activations into weights before anything is rounded (passes/smooth.py).

    method: `awq` (scales from mean magnitudes, searched on the block's output with rounded weights), `smoothquant`
    (from maxima, alpha fixed or searched with rounded weights and activations), or `none`. tokens: how many of the
    calibration's tokens the search looks at. grid: candidates of a search.
    """

    method: str = field(default="none", metadata=_by(_one_of("none", "awq", "smoothquant")))
    alpha: float | str = field(default="search", metadata=_by(_alpha))
    tokens: int = field(default=4096, metadata=_by(_count))
    grid: int = field(default=20, metadata=_by(_count))


@dataclass(frozen=True)
class Quantise:
    """How real weights become integers.

    method: `rtn` (to nearest) or `gptq`. range: what chooses a group's end points: `minmax` its own, `mse` those shrunk by
    whichever of a few factors gives the least squared error, `output` the same with errors weighed by the calibration's
    inputs (AWQ's clip search). symmetric: the end points are ± the largest magnitude. The rest is GPTQ's: damping, the
    share of the mean diagonal added to it; block, columns a lazy update; order, in which columns are rounded;
    static_groups, whether groups' scales are those of the weights before any was rounded.
    """

    method: str = field(default="rtn", metadata=_by(_one_of("rtn", "gptq")))
    range: str = field(default="minmax", metadata=_by(_one_of("minmax", "mse", "output")))
    symmetric: bool = field(default=False, metadata=_by(_flag))
    damping: float = field(default=0.01, metadata=_by(_number(0, 1)))
    block: int = field(default=128, metadata=_by(_count))
    order: str = field(default="activation", metadata=_by(_one_of("activation", "natural")))
    static_groups: bool = field(default=True, metadata=_by(_flag))


@dataclass(frozen=True)
class Outliers:
    """LLM.int8(): input features whose calibrated magnitude reaches `threshold` stay in bf16, at most the share `most` of
    a matrix's features (the largest first). threshold null: none."""

    threshold: float | None = field(default=None, metadata=_by(_number(0, math.inf, optional=True)))
    most: float = field(default=0.0625, metadata=_by(_number(0, 0.5)))


@dataclass(frozen=True)
class Mixed:
    """Formats chosen by measured sensitivity: as good as `budget` bits a weight allows (scales counted), or as small as keeps
    the sum of the measured divergences within `max_kl` nats. `tokens`: of the calibration's text, to measure on."""

    budget: float | None = field(default=None, metadata=_by(_bits))
    max_kl: float | None = field(default=None, metadata=_by(_limit))
    candidates: tuple[str, ...] = field(
        default=("int3_g64", "int4_g128", "int4_g64", "int4_g32", "int8"), metadata=_by(_candidates)
    )
    tokens: int = field(default=512, metadata=_by(_count))

    @property
    def wanted(self) -> bool:
        return self.budget is not None or self.max_kl is not None


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
    calibration: Calibration = field(default=Calibration(), metadata=_by(_section(Calibration)))
    smooth: Smooth = field(default=Smooth(), metadata=_by(_section(Smooth)))
    quantise: Quantise = field(default=Quantise(), metadata=_by(_section(Quantise)))
    outliers: Outliers = field(default=Outliers(), metadata=_by(_section(Outliers)))
    mixed: Mixed = field(default=Mixed(), metadata=_by(_section(Mixed)))
    max_context: int | None = field(default=None, metadata=_by(_optional_count))
    overrides: tuple[Override, ...] = field(default=(), metadata=_by(_overrides))
    verify: Verify = field(default=Verify(), metadata=_by(_section(Verify)))

    @property
    def calibrates(self) -> list[str]:
        """The keys that ask for calibration data; empty when nothing does."""
        asked = {
            "smooth.method": self.smooth.method != "none",
            "quantise.method": self.quantise.method == "gptq",
            "quantise.range": self.quantise.range == "output",
            "outliers.threshold": self.outliers.threshold is not None,
            "mixed": self.mixed.wanted,
            "kv_cache.max_error": self.kv_cache.max_error is not None,
            "linear.activation": "int8_static"
            in (self.linear.activation, *(item.activation for item in self.overrides)),
        }
        return [key for key, wanted in asked.items() if wanted]

    def resolved(self) -> dict[str, Any]:
        """Return the recipe as plain data (dicts, lists, text, numbers, null), every default written out."""
        plain = dataclasses.asdict(self)
        plain["overrides"] = [dict(item) for item in plain["overrides"]]
        plain["mixed"]["candidates"] = list(self.mixed.candidates)
        for section in (plain["linear"], plain["head"], plain["router"], *plain["overrides"]):
            section["activation"] = _resolve_activation(section["weight"], section["activation"])
        return plain

    def assign(self, modules: Mapping[str, str]) -> dict[str, ModuleFormat]:
        """Give each module its formats.

        `modules` maps checkpoint module names to roles: 'linear', 'embedding', 'head' or 'router'. The last
        override that matches decides. Raises InputError when a pattern matches no module, with names like it.
        """
        base = {
            role: (getattr(self, role).weight, getattr(self, role).activation)
            for role in ("linear", "head", "router")
        }
        base["embedding"] = (self.embedding.weight, "auto")
        chosen = {name: base[role] for name, role in modules.items()}
        for index, override in enumerate(self.overrides):
            matched = [name for name in modules if fnmatchcase(name, override.match)]
            if not matched:
                raise _unmatched(index, override.match, modules)
            chosen.update(dict.fromkeys(matched, (override.weight, override.activation)))
        return {
            name: ModuleFormat(weight, _resolve_activation(weight, activation))
            for name, (weight, activation) in chosen.items()
        }


def _resolve_activation(weight: str, activation: str) -> str:
    return activation if activation != "auto" or weight == _KEEP else default_activation(weight)


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
    fits = ("int8",) if weight == _KEEP else activations_for(weight)
    if activation not in ("auto", *fits):
        raise InputError(
            f"recipe keys '{inner}weight' and '{inner}activation' do not go together",
            found=f"weight {weight}, activation {activation}",
            expected=f"activation {' or '.join(fits)} (or auto) with weight {weight}",
            action=f"set {inner}activation=auto, or choose another {inner}weight",
        )


def _check_together(recipe: Recipe) -> None:
    """Refuse options that contradict or that nothing would honour."""

    def refuse(keys: str, found: str, expected: str, action: str) -> None:
        raise InputError(
            f"recipe keys {keys} do not go together", found=found, expected=expected, action=action
        )

    linear, smooth, quantise, mixed = recipe.linear.weight, recipe.smooth, recipe.quantise, recipe.mixed
    integers = linear != _KEEP and parse_weight(linear).kind != "float"
    if mixed.budget is not None and mixed.max_kl is not None:
        refuse(
            "'mixed.budget' and 'mixed.max_kl'",
            f"budget {mixed.budget:g}, max_kl {mixed.max_kl:g}",
            "one of them: the other follows",
            "set one to null",
        )
    calibrated = [key for key in recipe.calibrates if key not in ("kv_cache.max_error", "linear.activation")]
    if not integers and calibrated:
        refuse(
            f"'linear.weight' and '{calibrated[0]}'",
            f"weight {linear}",
            "an integer weight format for what is calibrated to be rounded",
            "choose an integer linear.weight, such as int4_g64",
        )
    if smooth.method != "smoothquant" and smooth.alpha != "search":
        refuse(
            "'smooth.method' and 'smooth.alpha'",
            f"method {smooth.method}, alpha {smooth.alpha}",
            "alpha with smoothquant only (AWQ searches its exponent)",
            "set smooth.method=smoothquant, or leave alpha out",
        )
    if quantise.method != "gptq":
        default = Quantise()
        for key in ("damping", "block", "order", "static_groups"):
            if getattr(quantise, key) != getattr(default, key):
                refuse(
                    f"'quantise.method' and 'quantise.{key}'",
                    f"method {quantise.method}, {key} {getattr(quantise, key)}",
                    f"{key} with gptq only",
                    "set quantise.method=gptq, or leave it out",
                )
    if quantise.order == "activation" and not quantise.static_groups:
        refuse(
            "'quantise.order' and 'quantise.static_groups'",
            "order activation, static_groups false",
            "order natural where groups' scales are found on the way: a group is then rounded in one piece",
            "set quantise.order=natural, or quantise.static_groups=true",
        )
    if recipe.outliers.threshold is not None and linear != "int8":
        refuse(
            "'outliers.threshold' and 'linear.weight'",
            f"threshold {recipe.outliers.threshold:g}, weight {linear}",
            "weight int8: the decomposition is one of 8-bit matrices",
            "set linear.weight=int8, or outliers.threshold=null",
        )
    if recipe.kv_cache.max_error is not None and recipe.kv_cache.format != "int8":
        refuse(
            "'kv_cache.format' and 'kv_cache.max_error'",
            f"format {recipe.kv_cache.format}, max_error {recipe.kv_cache.max_error:g}",
            "max_error with format int8: it chooses the layers that keep bf16",
            "set kv_cache.format=int8, or kv_cache.max_error=null",
        )
    for role in ("head", "router"):
        if getattr(recipe, role).activation == "int8_static":
            refuse(
                f"'{role}.activation' and 'calibration'",
                "int8_static",
                "static activation scales for linears only",
                f"set {role}.activation=auto",
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
    recipe = _parse(Recipe, data, "")
    _check_together(recipe)
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
