"""Recipes: loading, extending, overriding, and what every mistake is told."""

import json

import pytest

from enginewright.recipes.errors import InputError
from enginewright.recipes.formats import WEIGHT_FORMATS, activations_for, default_activation
from enginewright.recipes.recipe import list_recipes, load_recipe


@pytest.mark.parametrize(
    "name, linear, embedding, head, cache",
    [
        ("fp32", "f32", "f32", "f32", "f32"),
        ("bf16", "bf16", "bf16", "bf16", "bf16"),
        ("int8", "int8", "int8", "int8", "bf16"),
        ("int4", "int4_g64", "int8", "int8", "bf16"),
        ("keep", "keep", "keep", "keep", "bf16"),
    ],
)
def test_the_recipes_that_come_along(name, linear, embedding, head, cache):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert (recipe.linear.weight, recipe.embedding.weight, recipe.head.weight) == (linear, embedding, head)
    assert recipe.kv_cache.format == cache and recipe.kv_cache.page_size == 16
    assert recipe.router.weight == "f32"
    assert recipe.verify.max_kl is not None


def test_list_names_and_describes_each():
    recipes = list_recipes()
    assert {"fp32", "bf16", "int8", "int4", "keep"} <= set(recipes)
    assert all(text and "\n" not in text for text in recipes.values())
    assert list(recipes) == sorted(recipes)


def test_resolved_is_plain_data_with_every_activation_named():
    plain = load_recipe("int4", ['overrides+={match: "*.o_proj", weight: bf16}']).resolved()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["linear"] == {"weight": "int4_g64", "activation": "int8_g64"}
    assert plain["overrides"] == [{"match": "*.o_proj", "weight": "bf16", "activation": "bf16"}]
    assert load_recipe("keep").resolved()["linear"] == {"weight": "keep", "activation": "auto"}


def test_extends_by_name_and_by_path(tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: int4\nverify: {max_kl: 1e-1}\nmax_context: 512\n")
    (tmp_path / "ours.yml").write_text("extends: ./mine.yaml\ndescription: ours\nkv_cache: {page_size: 32}\n")
    recipe = load_recipe(tmp_path / "ours.yml")
    assert (recipe.name, recipe.description) == ("ours", "ours")
    assert recipe.linear.weight == "int4_g64"
    assert recipe.verify.max_kl == 0.1
    assert recipe.max_context == 512
    assert (recipe.kv_cache.format, recipe.kv_cache.page_size) == ("bf16", 32)


def test_overrides_take_lists_numbers_null_and_indices():
    recipe = load_recipe(
        "int4",
        [
            "max_context=2048",
            "verify.max_kl=null",
            'overrides=[{match: "*.down_proj", weight: int8}]',
            'overrides+={match: "*.o_proj", weight: bf16}',
            "overrides.0.weight=f32",
            "linear.weight=int4_g32",
        ],
    )
    assert recipe.max_context == 2048
    assert recipe.verify.max_kl is None
    assert [(item.match, item.weight) for item in recipe.overrides] == [
        ("*.down_proj", "f32"),
        ("*.o_proj", "bf16"),
    ]
    assert recipe.linear.weight == "int4_g32"


@pytest.mark.parametrize(
    "overrides, said",
    [
        (
            ["linear.wieght=int8"],
            ["'linear.wieght'", "linear.weight, linear.activation", "did you mean 'linear.weight'"],
        ),
        (["lienar={weight: int8}"], ["'lienar'", "did you mean 'linear'"]),
        (
            ["linear.weight=int5_g64"],
            ["'linear.weight'", "'int5_g64'", "_g16, _g32, _g64", "int4_g64"],
        ),
        (["linear.weight=int4_g1024"], ["'linear.weight'", "int4_g1024", "_g256"]),
        (["linear.weight=int8_zp"], ["'linear.weight'", "int8_zp", "uint8"]),
        (["linear.weight=int8", "outliers.threshold=.inf"], ["'outliers.threshold'", "inf", "from 0 to"]),
        (["calibration.samples=0"], ["'calibration.samples'", "above 0"]),
        (
            ["mixed.budget=4.5 bits", "mixed.max_kl=0.02"],
            ["'mixed.budget' and 'mixed.max_kl'", "one of them"],
        ),
        (["smooth.alpha=0.5"], ["'smooth.method' and 'smooth.alpha'", "smoothquant only"]),
        (["quantise.damping=0.1"], ["'quantise.method' and 'quantise.damping'", "gptq only"]),
        (
            ["quantise.method=gptq", "quantise.static_groups=false"],
            ["'quantise.order' and 'quantise.static_groups'", "order activation", "quantise.order=natural"],
        ),
        (["quantise.static_groups=false"], ["'quantise.static_groups'", "gptq only"]),
        (["outliers.threshold=6"], ["'outliers.threshold' and 'linear.weight'", "weight int8"]),
        (["kv_cache.max_error=0.1"], ["'kv_cache.format' and 'kv_cache.max_error'", "format int8"]),
        (
            ["linear.weight=bf16", "smooth.method=awq"],
            ["'linear.weight' and 'smooth.method'", "an integer weight"],
        ),
        (["head.activation=int8_static"], ["'head.activation'", "static"]),
        (["linear.weight=4"], ["'linear.weight'", "found: 4"]),
        (["linear.weight=true"], ["'linear.weight'", "found: True"]),
        (["linear.weight="], ["'linear.weight'", "found: null"]),
        (
            ["linear.activation=int8_g16"],
            ["'linear.activation'", "weight int4_g64, activation int8_g16", "activation int8"],
        ),
        (["kv_cache.page_size=17"], ["'kv_cache.page_size'", "found: 17", "16, 32"]),
        (["kv_cache.page_size=16.0"], ["'kv_cache.page_size'", "found: 16.0"]),
        (["kv_cache=bf16"], ["'kv_cache'", "'bf16'", "format, page_size"]),
        (["max_context=0"], ["'max_context'", "found: 0", "above 0, or null"]),
        (["max_context=yes"], ["'max_context'", "'yes'"]),
        (["max_context=true"], ["'max_context'", "True"]),
        (["verify.min_top1=1.5"], ["'verify.min_top1'", "1.5", "from 0 to 1"]),
        (["verify.max_kl=.nan"], ["'verify.max_kl'", "nan"]),
        (["verify.max_kl=-1"], ["'verify.max_kl'", "-1"]),
        (["overrides={}"], ["'overrides'", "a list"]),
        (["overrides=[{weight: int8}]"], ["'overrides.0.match' is missing"]),
        (["overrides=[{match: '*', weight: int9}]"], ["'overrides.0.weight'", "'int9'"]),
        (["overrides.0.weight=int8"], ["'overrides.0'", "the list is empty"]),
        (["linear.weight.bits=4"], ["'linear.weight' has no keys inside it"]),
        (["linear.weight"], ["KEY=VALUE"]),
        (["linear={weight: int8"], ["'linear' is not valid YAML"]),
        (["linear=" + "[" * 5000], ["'linear' is not valid YAML"]),
        (["linear={weight: int8, weight: bf16}"], ["'weight' is given twice"]),
        (["quantise.method=gptqq"], ["'quantise.method'", "'gptqq'", "rtn"]),
    ],
)
def test_mistakes_are_named(overrides, said):
    with pytest.raises(InputError) as raised:
        load_recipe("int4", overrides)
    assert raised.value.exit_code == 2
    for part in said:
        assert part in str(raised.value)


def test_unknown_recipe_and_files(tmp_path):
    with pytest.raises(InputError, match=r"(?s)unknown recipe 'int44'.*did you mean 'int4'"):
        load_recipe("int44")
    with pytest.raises(InputError, match="no recipe file"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(InputError, match="not a mapping"):
        load_recipe(tmp_path / "list.yaml")
    (tmp_path / "bare.yaml").write_text("description: nothing else\n")
    with pytest.raises(InputError, match=r"(?s)'linear' is missing.*extends"):
        load_recipe(tmp_path / "bare.yaml")
    (tmp_path / "a.yaml").write_text("extends: ./b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: ./a.yaml\n")
    with pytest.raises(InputError, match=r"(?s)circle.*a -> b -> a"):
        load_recipe(tmp_path / "a.yaml")


def test_patterns_decide_and_the_last_match_wins():
    modules = {
        "model.embed_tokens": "embedding",
        "model.layers.0.mlp.down_proj": "linear",
        "model.layers.1.mlp.down_proj": "linear",
        "model.layers.1.mlp.gate": "router",
        "lm_head": "head",
    }
    recipe = load_recipe(
        "int4",
        ['overrides=[{match: "*.down_proj", weight: int8}, {match: "model.layers.1.*", weight: bf16}]'],
    )
    formats = {name: (item.weight, item.activation) for name, item in recipe.assign(modules).items()}
    assert formats == {
        "model.embed_tokens": ("int8", "int8_g32"),
        "model.layers.0.mlp.down_proj": ("int8", "int8_g32"),
        "model.layers.1.mlp.down_proj": ("bf16", "bf16"),
        "model.layers.1.mlp.gate": ("bf16", "bf16"),
        "lm_head": ("int8", "int8_g32"),
    }


def test_groups_found_on_the_way_go_with_the_natural_order():
    recipe = load_recipe(
        "int4", ["quantise.method=gptq", "quantise.static_groups=false", "quantise.order=natural"]
    )
    assert not recipe.quantise.static_groups


def test_other_tools_spellings_are_understood():
    assert load_recipe("int4", ["linear.weight=int4_g-1"]).linear.weight == "int4"
    assert load_recipe("int4", ["mixed.budget=4.5 bits"]).mixed.budget == 4.5


@pytest.mark.parametrize(
    "pattern", ["model.layers.*.mlp.dwon_proj", "*.down_prj", "model.layers.0.mlp.down_proj.weight"]
)
def test_a_pattern_that_matches_nothing_names_near_modules(pattern):
    modules = {
        "model.layers.0.mlp.up_proj": "linear",
        "model.layers.0.mlp.down_proj": "linear",
        "lm_head": "head",
    }
    recipe = load_recipe("int4", [f"overrides=[{{match: '{pattern}', weight: int8}}]"])
    with pytest.raises(InputError) as raised:
        recipe.assign(modules)
    assert pattern in str(raised.value) and "model.layers.0.mlp.down_proj" in str(raised.value)
    assert "overrides.0.match" in str(raised.value)


@pytest.mark.parametrize("weight", WEIGHT_FORMATS)
def test_each_weight_format_knows_its_activation(weight):
    recipe = load_recipe("fp32", [f"linear.weight={weight}"])
    assert recipe.resolved()["linear"]["activation"] == default_activation(weight)
    for activation in activations_for(weight):
        chosen = load_recipe("fp32", [f"linear.weight={weight}", f"linear.activation={activation}"])
        assert chosen.resolved()["linear"]["activation"] == activation
        assert chosen.assign({"a": "linear"})["a"].activation == activation


def test_a_draft_is_some_layers_or_none():
    assert load_recipe("int4").draft.layers is None
    for none in ("0", "null"):
        assert load_recipe("int4", [f"draft.layers={none}"]).draft.layers is None
    recipe = load_recipe("int4", ["draft.layers=8"])
    assert recipe.draft.layers == 8 and recipe.resolved()["draft"] == {"layers": 8, "head": "shared"}
    for bad in ("-1", "1.5", "true", "all", "[8]"):
        with pytest.raises(InputError, match=r"draft\.layers"):
            load_recipe("int4", [f"draft.layers={bad}"])


def test_a_distilled_head_asks_for_text_and_changes_no_rounding():
    recipe = load_recipe("bf16", ["draft.layers=8", "draft.head=distilled"])
    assert recipe.calibrates == ["draft.head"] and recipe.passes_calibrate == []
    both = load_recipe("int4-gptq", ["draft.layers=8", "draft.head=distilled"])
    assert set(both.calibrates) == {*both.passes_calibrate, "draft.head"} and both.passes_calibrate
    with pytest.raises(InputError, match="go together"):
        load_recipe("bf16", ["draft.head=distilled"])
