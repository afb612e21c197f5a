"""onnxruntime-genai and Optimum load our folders and generate what our own runtime does from the plain model of the same recipe.

Both are installed by name into an environment of their own (Optimum needs an older transformers), which is kept in the user's
cache. Where they cannot be installed, the tests are skipped with pip's last words.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import enginewright
from enginewright.backends.artifact import open_engine
from enginewright.backends.onnx.flavours.answers import FlavourModel
from tests import models
from tests.passes.architectures import save

pytestmark = pytest.mark.slow

PACKAGES = ("onnxruntime-genai==0.18.0", "optimum-onnx[onnxruntime]==0.1.0")
TEXTS = (
    "The capital of France is",
    "Water boils at a lower temperature on a mountain than at the sea, because",
    "Once upon a time there was a small engine that wanted to",
)
NEW = 24

GENAI = """
import json, sys
import numpy as np
import onnxruntime_genai as og

order = json.load(sys.stdin)
model = og.Model(order["folder"])
prompts, width = order["prompts"], max(map(len, order["prompts"]))
ids = np.full((len(prompts), width), order["pad"], np.int32)
for row, prompt in zip(ids, prompts):
    row[: len(prompt)] = prompt
options = og.GeneratorParams(model)
options.set_search_options(batch_size=len(prompts), max_length=width + order["new"], do_sample=False)
generator = og.Generator(model, options)
generator.append_tokens(ids)
while not generator.is_done():
    generator.generate_next_token()
found = [[int(token) for token in generator.get_sequence(i)][width:] for i in range(len(prompts))]
text = None
if order["text"]:
    text = [int(token) for token in og.Tokenizer(model).encode(order["text"])]
json.dump({"tokens": found, "encoded": text}, sys.stdout)
"""

OPTIMUM = """
import json, sys
import torch
from optimum.onnxruntime import ORTModelForCausalLM

order = json.load(sys.stdin)
model = ORTModelForCausalLM.from_pretrained(order["folder"])
assert model.can_use_cache
prompts, width = order["prompts"], max(map(len, order["prompts"]))
ids = torch.full((len(prompts), width), order["pad"])
mask = torch.zeros_like(ids)
for at, prompt in enumerate(prompts):
    ids[at, width - len(prompt) :], mask[at, width - len(prompt) :] = torch.tensor(prompt), 1
made = model.generate(
    input_ids=ids, attention_mask=mask, max_new_tokens=order["new"], do_sample=False, use_cache=True,
    pad_token_id=order["pad"],
)
json.dump({"tokens": made[:, width:].tolist()}, sys.stdout)
"""


@functools.cache
def interpreter() -> Path:
    """The interpreter of an environment that has the foreign runtimes, made where it does not exist yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = "-".join(package.partition("==")[2] for package in PACKAGES)
    place = cache / "enginewright-tests" / f"onnx-runtimes-{name}"
    python, done = place / "bin" / "python", place / "complete"
    if done.is_file():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
    packages = next((place / "lib").glob("python*")) / "site-packages"
    # torch, numpy and onnxruntime are large, and those of this interpreter do.
    seen = [path for path in sys.path if path.endswith("site-packages")] or [sysconfig.get_path("purelib")]
    (packages / "shared.pth").write_text("\n".join(seen) + "\n")
    made = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", *PACKAGES], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(
            f"cannot install {', '.join(PACKAGES)}: {(made.stderr.strip().splitlines() or ['no word'])[-1]}"
        )
    done.touch()
    return python


def generated(flavour: str, built: Path, prompts: list[list[int]], text: str = "") -> dict[str, Any]:
    """What the foreign runtime makes of the prompts, all in one batch."""
    manifest = open_engine(built).manifest["model"]
    pad = manifest["pad_token_id"] if manifest["pad_token_id"] is not None else manifest["eos_token_ids"][0]
    order = {"folder": str(built), "prompts": prompts, "new": NEW, "pad": pad, "text": text}
    script = GENAI if flavour == "genai" else OPTIMUM
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1"
    }
    found = subprocess.run(
        [str(interpreter()), "-c", script],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        env=environment,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    answer: dict[str, Any] = json.loads(found.stdout.strip().splitlines()[-1])
    return answer


@functools.cache
def built(model: Path, recipe: str, flavour: str) -> Path:
    kept = tempfile.TemporaryDirectory(prefix="enginewright-onnx-")
    _KEPT.append(kept)
    out = Path(kept.name) / "engine"
    overrides = [f"onnx.flavour={flavour}", "max_context=256", "kv_cache.format=f32"]
    report = enginewright.optimize(model, recipe, out, backend="onnx", overrides=overrides)
    assert report.verification["verdict"] == "passed"
    return report.path


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def hold_against_our_runtime(
    model: Path, recipe: str, flavour: str, prompts: list[list[int]], theirs: list[list[int]]
) -> None:
    """Token for token, up to the first end. Where they part, the two tokens' logits must be a tie: closer than twice the largest
    difference of the two models' logits on the prompts and our answers."""
    folder = built(model, recipe, flavour)
    with enginewright.load(built(model, recipe, "plain"), threads=1) as engine:
        ours = [list(made.token_ids) for made in engine.generate(prompts, max_tokens=NEW, ignore_eos=True)]
        whole = [prompt + answer for prompt, answer in zip(prompts, ours, strict=True)]
        our_logits = engine.logits(whole)
    opened = FlavourModel(folder / "model.onnx", flavour, threads=1)
    error = max(
        float(np.abs(found - logits).max())
        for found, logits in zip(opened.batch(whole), our_logits, strict=True)
    )
    assert error <= 1e-3 * max(float(np.abs(logits).max()) for logits in our_logits)
    ends = set(open_engine(folder).manifest["model"]["eos_token_ids"])
    for prompt, answer, other, logits in zip(prompts, ours, theirs, our_logits, strict=True):
        assert len(other) >= 1
        for at, (token, found) in enumerate(zip(answer, other, strict=False)):
            if token != found:
                row = logits[len(prompt) + at - 1]
                assert row[token] - row[found] <= 2 * error, f"token {at} of {answer} is {found}"
                break
            if token in ends:
                break
        else:
            assert len(other) == NEW


@pytest.mark.parametrize("flavour", ["genai", "optimum"])
@pytest.mark.parametrize("recipe", ["fp32", "int4"])
def test_a_batch_of_unequal_prompts_gets_our_runtimes_tokens(recipe: str, flavour: str) -> None:
    model = models.smollm2()
    with enginewright.load(built(model, recipe, "plain"), threads=1) as engine:
        prompts = [list(engine.tokenizer.encode(text)) for text in TEXTS]
    assert len({len(prompt) for prompt in prompts}) == 3
    found = generated(flavour, built(model, recipe, flavour), prompts, TEXTS[0] if flavour == "genai" else "")
    hold_against_our_runtime(model, recipe, flavour, prompts, found["tokens"])
    if flavour == "genai":
        assert found["encoded"] == prompts[0]


@pytest.mark.parametrize("arch", ["gpt2", "gemma3_text"])
@pytest.mark.parametrize("flavour", ["genai", "optimum"])
def test_learned_positions_and_windows_in_a_batch(arch: str, flavour: str, tmp_path: Path) -> None:
    """Positions of padded rows count from their first token; windows are crossed. Heads are no quotient of the hidden size."""
    model = save(arch, tmp_path / "model", **({"n_embd": 64} if arch == "gpt2" else {"head_dim": 16}))
    prompts = [[3 + (7 * i * i + 5 * j) % 120 for j in range(length)] for i, length in enumerate((3, 17, 40))]
    found = generated(flavour, built(model, "fp32", flavour), prompts)
    hold_against_our_runtime(model, "fp32", flavour, prompts, found["tokens"])
