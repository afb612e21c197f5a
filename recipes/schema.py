"""The schema of recipes: a tree of frozen dataclasses, the checks of what goes together, and who gets which format.

This file imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from enginewright.recipes import values
from enginewright.recipes.errors import InputError, near_matches
from enginewright.recipes.formats import (
    COMPUTE_FORMATS,
    KV_FORMATS,
    activations_for,
    default_activation,
    parse_weight,
)
from enginewright.recipes.values import KEEP, by, unusable

__all__ = [
    "Calibration",
    "Draft",
    "Mixed",
    "ModuleFormat",
    "Onnx",
    "Outliers",
    "Override",
    "Quantise",
    "Recipe",
    "Smooth",
    "TensorRT",
    "Verify",
    "check_together",
    "parse",
]


@dataclass(frozen=True)
class Linear:
    """Matrices that activations are multiplied by. Activation `auto` is whatever goes with the weight."""

    weight: str = field(metadata=by(values.weight_format))
    activation: str = field(default="auto", metadata=by(values.activation_format))


@dataclass(frozen=True)
class Embedding:
    """The token table (rows are looked up, nothing is multiplied)."""

    weight: str = field(metadata=by(values.weight_format))


@dataclass(frozen=True)
class KvCache:
    """How keys and values are stored. page_size: tokens of a page; 0: one page a sequence, as long as the maximum context, for
    a backend whose caches are linear. `max_error` (with int8): a layer whose attention output would change by more than this
    share keeps bf16; measured by calibration, null keeps int8 everywhere."""

    format: str = field(metadata=by(values.one_of(*KV_FORMATS)))
    page_size: int = field(default=16, metadata=by(values.one_of(0, 16, 32)))
    max_error: float | None = field(default=None, metadata=by(values.number(0, 1, optional=True)))

    def tokens_a_page(self, max_context: int) -> int:
        """The page size of an engine whose sequences have at most `max_context` tokens."""
        return self.page_size or max_context


@dataclass(frozen=True)
class Calibration:
    """The text that calibrated methods see: `samples` sequences of `length` tokens.

    source: `self` (the model's own bf16 engine writes it), or a file (.txt, .jsonl, .parquet; `text_field` names the text in a
    record). memory: GiB of activations that may be held; beyond it they go to disk.
    """

    source: str = field(default="self", metadata=by(values.text))
    text_field: str = field(default="text", metadata=by(values.text))
    samples: int = field(default=128, metadata=by(values.count))
    length: int = field(default=512, metadata=by(values.count))
    seed: int = field(default=0, metadata=by(values.seed))
    memory: float = field(default=2.0, metadata=by(values.number(0.001, 4096)))


@dataclass(frozen=True)
class Smooth:
    """Scales moved from activations into weights before anything is rounded (passes/smooth.py).

    method: `awq` (scales from mean magnitudes, searched on the block's output with rounded weights), `smoothquant`
    (from maxima, alpha fixed or searched with rounded weights and activations), or `none`. tokens: how many of the
    calibration's tokens the search looks at. grid: candidates of a search.
    """

    method: str = field(default="none", metadata=by(values.one_of("none", "awq", "smoothquant")))
    alpha: float | str = field(default="search", metadata=by(values.alpha))
    tokens: int = field(default=4096, metadata=by(values.count))
    grid: int = field(default=20, metadata=by(values.count))


@dataclass(frozen=True)
class Quantise:
    """How real weights become integers.

    method: `rtn` (to nearest) or `gptq`. range: what chooses a group's end points: `minmax` its own, `mse` those shrunk by
    whichever of a few factors gives the least squared error, `output` the same with errors weighed by the calibration's
    inputs (AWQ's clip search). symmetric: the end points are ± the largest magnitude. The rest is GPTQ's: damping, the
    share of the mean diagonal added to it; block, columns a lazy update; order, in which columns are rounded;
    static_groups, whether groups' scales are those of the weights before any was rounded.
    """

    method: str = field(default="rtn", metadata=by(values.one_of("rtn", "gptq")))
    range: str = field(default="minmax", metadata=by(values.one_of("minmax", "mse", "output")))
    symmetric: bool = field(default=False, metadata=by(values.flag))
    damping: float = field(default=0.01, metadata=by(values.number(0, 1)))
    block: int = field(default=128, metadata=by(values.count))
    order: str = field(default="activation", metadata=by(values.one_of("activation", "natural")))
    static_groups: bool = field(default=True, metadata=by(values.flag))


@dataclass(frozen=True)
class Outliers:
    """LLM.int8(): input features whose calibrated magnitude reaches `threshold` times the median feature's stay in bf16, at
    most the share `most` of a matrix's features (the largest first). threshold null: none."""

    threshold: float | None = field(default=None, metadata=by(values.number(0, 1e6, optional=True)))
    most: float = field(default=0.0625, metadata=by(values.number(0, 0.5)))


@dataclass(frozen=True)
class Mixed:
    """Formats chosen by measured sensitivity: as good as `budget` bits a weight allows (scales counted), or as small as keeps
    the sum of the measured divergences within `max_kl` nats. `tokens`: of the calibration's text, to measure on. Linears
    that an override matches have its format, and count in neither."""

    budget: float | None = field(default=None, metadata=by(values.bits))
    max_kl: float | None = field(default=None, metadata=by(values.limit))
    candidates: tuple[str, ...] = field(
        default=("int3_g64", "int4_g128", "int4_g64", "int4_g32", "int8"), metadata=by(values.candidates)
    )
    tokens: int = field(default=512, metadata=by(values.count))

    @property
    def wanted(self) -> bool:
        return self.budget is not None or self.max_kl is not None


@dataclass(frozen=True)
class Draft:
    """What the engine can draft with by itself, for speculation: its first `layers` layers and its head (passes/cut_draft.py);
    null or 0: nothing. head: `shared`, the model's own as it is, or `distilled`, with a map before it that is learned on the
    calibration's text (passes/distil.py)."""

    layers: int | None = field(default=None, metadata=by(values.layers))
    head: str = field(default="shared", metadata=by(values.one_of("shared", "distilled")))


@dataclass(frozen=True)
class TensorRT:
    """What TensorRT's plans are built for. sequences, tokens: the most of a step (memory between kernels grows with both).
    one_plan: one plan for all targets, which holds kernels for each, in place of a plan for each target."""

    sequences: int = field(default=32, metadata=by(values.count))
    tokens: int = field(default=512, metadata=by(values.count))
    one_plan: bool = field(default=False, metadata=by(values.flag))


@dataclass(frozen=True)
class Onnx:
    """Whose runtime an ONNX model is written for: `plain`, ours; `genai`, onnxruntime-genai; `optimum`, Optimum's
    ORTModelForCausalLM."""

    flavour: str = field(default="plain", metadata=by(values.one_of("plain", "genai", "optimum")))


@dataclass(frozen=True)
class Override:
    """Another format for the modules whose checkpoint name matches a glob (`*` crosses dots)."""

    match: str = field(metadata=by(values.text))
    weight: str = field(metadata=by(values.weight_format))
    activation: str = field(default="auto", metadata=by(values.activation_format))


@dataclass(frozen=True)
class Verify:
    """Limits on the finished engine against the source model in fp32; null sets no limit.

    max_logit_error: largest |logit difference| as a share of the largest |logit|. max_kl: mean KL divergence a token,
    nats. min_top1: share of positions with the same best token. max_perplexity_ratio: engine's perplexity over the source's.
    """

    max_logit_error: float | None = field(default=None, metadata=by(values.limit))
    max_kl: float | None = field(default=None, metadata=by(values.limit))
    min_top1: float | None = field(default=None, metadata=by(values.share))
    max_perplexity_ratio: float | None = field(default=None, metadata=by(values.limit))


@dataclass(frozen=True)
class ModuleFormat:
    """What one module gets: a weight format, and the activation format of its product."""

    weight: str
    activation: str


def _section(cls: type) -> Callable[[Any, str], Any]:
    return lambda value, key: parse(cls, value, key)


def _overrides(value: Any, key: str) -> tuple[Override, ...]:
    if not isinstance(value, list):
        raise unusable(key, value, "a list of {match, weight, activation}")
    return tuple(parse(Override, item, f"{key}.{index}") for index, item in enumerate(value))


@dataclass(frozen=True)
class Recipe:
    """One resolved recipe. `router` is the linear that scores experts: small, and wrong choices cost much.

    `compute` is what values are between products, and what activations `auto` are beside integer weights; `auto` leaves both
    to the backend.
    """

    name: str = field(metadata=by(values.text))
    linear: Linear = field(metadata=by(_section(Linear)))
    embedding: Embedding = field(metadata=by(_section(Embedding)))
    head: Linear = field(metadata=by(_section(Linear)))
    kv_cache: KvCache = field(metadata=by(_section(KvCache)))
    description: str = field(default="", metadata=by(values.text))
    router: Linear = field(default=Linear("f32"), metadata=by(_section(Linear)))
    compute: str = field(default="auto", metadata=by(values.one_of(*COMPUTE_FORMATS)))
    calibration: Calibration = field(default=Calibration(), metadata=by(_section(Calibration)))
    smooth: Smooth = field(default=Smooth(), metadata=by(_section(Smooth)))
    quantise: Quantise = field(default=Quantise(), metadata=by(_section(Quantise)))
    outliers: Outliers = field(default=Outliers(), metadata=by(_section(Outliers)))
    mixed: Mixed = field(default=Mixed(), metadata=by(_section(Mixed)))
    draft: Draft = field(default=Draft(), metadata=by(_section(Draft)))
    max_context: int | None = field(default=None, metadata=by(values.optional_count))
    overrides: tuple[Override, ...] = field(default=(), metadata=by(_overrides))
    verify: Verify = field(default=Verify(), metadata=by(_section(Verify)))
    tensorrt: TensorRT = field(default=TensorRT(), metadata=by(_section(TensorRT)))
    onnx: Onnx = field(default=Onnx(), metadata=by(_section(Onnx)))

    @property
    def calibrates(self) -> list[str]:
        """The keys that ask for calibration data; empty when nothing does."""
        draft = ["draft.head"] if self.draft.layers is not None and self.draft.head == "distilled" else []
        return [*self.passes_calibrate, *draft]

    @property
    def passes_calibrate(self) -> list[str]:
        """The keys that ask for calibration data while the model is rounded."""
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
            section["activation"] = self.activation_of(section["weight"], section["activation"])
        return plain

    def activation_of(self, weight: str, activation: str = "auto") -> str:
        """The activation format beside a weight format: what `auto` stands for in this recipe."""
        if activation != "auto" or weight == KEEP:
            return activation
        return default_activation(weight, self.compute)

    def overrides_on(self, module: str) -> list[Override]:
        """The overrides that match a module's checkpoint name."""
        return [override for override in self.overrides if fnmatchcase(module, override.match)]

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
            name: ModuleFormat(weight, self.activation_of(weight, activation))
            for name, (weight, activation) in chosen.items()
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


def parse(cls: type, value: Any, key: str) -> Any:
    """Turn a mapping into dataclass `cls`, checking every key and value; `key` is the dotted path so far."""
    inner = f"{key}." if key else ""
    fields = {item.name: item for item in dataclasses.fields(cls)}
    if not isinstance(value, dict):
        raise unusable(key or "(the file)", value, "a mapping with the keys " + ", ".join(fields))
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
    fits = ("int8",) if weight == KEEP else activations_for(weight)
    if activation not in ("auto", *fits):
        raise InputError(
            f"recipe keys '{inner}weight' and '{inner}activation' do not go together",
            found=f"weight {weight}, activation {activation}",
            expected=f"activation {' or '.join(fits)} (or auto) with weight {weight}",
            action=f"set {inner}activation=auto, or choose another {inner}weight",
        )


def check_together(recipe: Recipe) -> None:
    """Refuse options that contradict or that nothing would honour."""

    def refuse(keys: str, found: str, expected: str, action: str) -> None:
        raise InputError(
            f"recipe keys {keys} do not go together", found=found, expected=expected, action=action
        )

    linear, smooth, quantise, mixed = recipe.linear.weight, recipe.smooth, recipe.quantise, recipe.mixed
    integers = linear != KEEP and parse_weight(linear).kind != "float"
    if mixed.budget is not None and mixed.max_kl is not None:
        refuse(
            "'mixed.budget' and 'mixed.max_kl'",
            f"budget {mixed.budget:g}, max_kl {mixed.max_kl:g}",
            "one of them: the other follows",
            "set one to null",
        )
    calibrated = [
        key for key in recipe.passes_calibrate if key not in ("kv_cache.max_error", "linear.activation")
    ]
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
    if recipe.draft.layers is None and recipe.draft.head != "shared":
        refuse(
            "'draft.layers' and 'draft.head'",
            f"no layers, head {recipe.draft.head}",
            "a head for a draft of some layers",
            "set draft.layers, or leave draft.head out",
        )
    for role in ("head", "router"):
        if getattr(recipe, role).activation == "int8_static":
            refuse(
                f"'{role}.activation' and 'calibration'",
                "int8_static",
                "static activation scales for linears only",
                f"set {role}.activation=auto",
            )
