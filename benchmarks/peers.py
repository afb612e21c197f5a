"""Speed beside llama.cpp and OpenVINO GenAI on the same machine, model and work, alternating in one run.

    python benchmarks/peers.py --model models/smollm2-135m --engine engines/smollm2-135m-int4 \
        --llama-bench PATH/llama-bench --llama-model Q4_0.gguf \
        --openvino-python VENV/bin/python --openvino-model FOLDER [--rounds 3] [--json FILE]

benchmarks/README.md says how to get the peers. A peer that is not given is left out. Each round runs every program once, in
turn, so that a slow minute of the machine hits all of them; the table gives medians and the ratio to ours. Beside each speed
stand the mean KL divergence to the fp32 model, the bits a weight and the format of the head, since speed alone can be bought.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.divergence import divergence

HERE = Path(__file__).resolve().parent
WORK = {
    "decode_1": "decode, batch 1",
    "decode_16": "decode, batch 16",
    "decode_32": "decode, batch 32",
    "prefill_512": "prefill 512",
}


def _json(command: list[str]) -> dict:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"peers: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout[done.stdout.index("{") if "{" in done.stdout else 0 :])


def ours(engine: str) -> dict[str, float]:
    """Tokens/s of this project: 64 new tokens after 128, and a prompt of 512."""
    base = [
        sys.executable,
        "-m",
        "enginewright",
        "bench",
        engine,
        "--json",
        "--repeat",
        "3",
        "--threads",
        "2",
        "--weights",
        "copy",
    ]
    decode = _json(
        [
            *base,
            "--batch",
            "1",
            "--batch",
            "16",
            "--batch",
            "32",
            "--prompt-tokens",
            "128",
            "--new-tokens",
            "64",
        ]
    )
    prefill = _json([*base, "--batch", "1", "--prompt-tokens", "512", "--new-tokens", "1"])
    figures = {f"decode_{entry['batch']}": entry["tokens_per_second"] for entry in decode["decode"]}
    figures["prefill_512"] = prefill["prefill"][0]["tokens_per_second"]
    figures["read_bandwidth_gbs"] = decode["read_bandwidth_gbs"]
    return figures


def llama(program: str, model: str) -> dict[str, float]:
    """Tokens/s of llama-bench: 64 new tokens after 128, and a prompt of 512."""
    command = [program, "-m", model, "-t", "2", "-ngl", "0", "-r", "3", "-o", "json"]
    out = {}
    for key, options in (
        ("decode_1", ["-p", "0", "-n", "64", "-d", "128"]),
        ("prefill_512", ["-p", "512", "-n", "0"]),
    ):
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
        out[key] = float(json.loads(done.stdout)[0]["avg_ts"])
    return out


def sample(model: str, count: int) -> np.ndarray:
    """Token ids of the package's verification text."""
    from importlib import resources

    from tokenizers import Tokenizer

    text = resources.files("enginewright").joinpath("verification", "text.txt").read_text(encoding="utf-8")
    return np.array(Tokenizer.from_file(f"{model}/tokenizer.json").encode(text).ids[:count], dtype=np.int64)


def mean_kl(reference: np.ndarray, logits: np.ndarray) -> float:
    """Mean over positions of KL(reference || logits), nats."""
    return float(divergence(reference, logits).mean())


def transformers_logits(ids: np.ndarray, folder: str, gguf: str | None = None) -> np.ndarray:
    """Logits of eager transformers in fp32, of a folder or of a GGUF file (its weights dequantised)."""
    import torch
    from transformers import AutoModelForCausalLM

    options = {"gguf_file": gguf} if gguf else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    with torch.inference_mode():
        return model(torch.from_numpy(ids)[None]).logits[0].float().numpy()


@click.command()
@click.option("--model", required=True, help="The Hugging Face folder that all engines were made from.")
@click.option("--engine", required=True)
@click.option("--llama-bench", "llama_bench")
@click.option("--llama-model")
@click.option("--openvino-python")
@click.option("--openvino-model")
@click.option("--rounds", default=3, show_default=True)
@click.option("--json", "out", type=click.Path(path_type=Path))
def main(
    model: str,
    engine: str,
    llama_bench: str | None,
    llama_model: str | None,
    openvino_python: str | None,
    openvino_model: str | None,
    rounds: int,
    out: Path | None,
) -> None:
    """Compare speeds; see the module's docstring."""
    contestants: dict[str, Callable[[], dict[str, float]]] = {"enginewright": lambda: ours(engine)}
    if llama_bench and llama_model:
        contestants["llama.cpp"] = lambda: llama(llama_bench, llama_model)
    peer = str(HERE / "openvino_peer.py")
    if openvino_python and openvino_model:
        contestants["OpenVINO GenAI"] = lambda: _json([openvino_python, peer, "speed", openvino_model])
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, run in contestants.items():
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr)
            runs[name].append(run())
    quality = _quality(model, engine, llama_model, openvino_python, openvino_model, peer)
    speeds = {
        name: {key: statistics.median(figure[key] for figure in figures) for key in WORK if key in figures[0]}
        for name, figures in runs.items()
    }
    bandwidth = statistics.median(figure["read_bandwidth_gbs"] for figure in runs["enginewright"])
    table = Table(
        "tokens/s, two threads",
        *speeds,
        title=f"medians of {rounds} alternating rounds, read bandwidth {bandwidth:.1f} GB/s",
    )
    for key, label in WORK.items():
        cells = []
        for name in speeds:
            value = speeds[name].get(key)
            ratio = (
                ""
                if name == "enginewright" or not value
                else f" (ours is {speeds['enginewright'][key] / value:.2f}×)"
            )
            cells.append(f"{value:,.0f}{ratio}" if value else "–")
        table.add_row(label, *cells)
    for row in ("mean KL to fp32", "weights", "head"):
        table.add_row(row, *(str(quality[name][row]) for name in speeds))
    Console(width=140).print(table)
    if out:
        out.write_text(
            json.dumps(
                {"speeds": speeds, "runs": runs, "quality": quality, "read_bandwidth_gbs": bandwidth},
                indent=1,
            )
        )


def _quality(
    model: str,
    engine: str,
    llama_model: str | None,
    openvino_python: str | None,
    openvino_model: str | None,
    peer: str,
) -> dict[str, dict[str, str]]:
    import enginewright

    ids = sample(model, 512)
    reference = transformers_logits(ids, model)
    with enginewright.load(engine) as loaded:
        recipe = loaded.artifact.manifest["recipe"]
        quality = {
            "enginewright": {
                "mean KL to fp32": f"{mean_kl(reference, loaded.logits([ids.tolist()])[0]):.4f}",
                "weights": f"{recipe['linear']['weight']}, offset a group",
                "head": recipe["head"]["weight"],
            }
        }
    if llama_model:
        path = Path(llama_model)
        kl = mean_kl(reference, transformers_logits(ids, str(path.parent), path.name))
        quality["llama.cpp"] = {
            "mean KL to fp32": f"{kl:.4f} (weights alone)",
            "weights": "Q4_0, group 32",
            "head": "as the file has it",
        }
    if openvino_python and openvino_model:
        with tempfile.TemporaryDirectory() as folder:
            np.save(f"{folder}/in.npy", ids)
            subprocess.run(
                [openvino_python, peer, "logits", openvino_model, f"{folder}/in.npy", f"{folder}/out.npy"],
                check=True,
            )
            kl = mean_kl(reference, np.load(f"{folder}/out.npy"))
        quality["OpenVINO GenAI"] = {
            "mean KL to fp32": f"{kl:.4f}",
            "weights": "int4, group 64",
            "head": "int8",
        }
    return quality


if __name__ == "__main__":
    main()
