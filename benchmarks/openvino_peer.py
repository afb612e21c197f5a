"""OpenVINO GenAI's side of peers.py; run by the Python of an environment that has openvino-genai.

python openvino_peer.py speed MODEL_FOLDER      tokens/s at batch 1, 16, 32 and prefill of 512, one JSON object
python openvino_peer.py logits MODEL_FOLDER IN.npy OUT.npy    logits [T, vocab] of the token ids in IN (one sequence)
"""

from __future__ import annotations

import json
import random
import sys
import time

import numpy as np


def speed(folder: str) -> None:
    """Decode: 128 prompt tokens, 64 new; the difference to a run of one new token leaves out the prefill."""
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 512
    scheduler.max_num_seqs = 64
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU")
    random.seed(0)

    def run(count: int, prompt: int, new: int) -> float:
        config = genai.GenerationConfig()
        config.max_new_tokens = new
        config.ignore_eos = True
        config.do_sample = False
        prompts = [
            ov.Tensor(np.array([[random.randint(1000, 40000) for _ in range(prompt)]])) for _ in range(count)
        ]
        started = time.perf_counter()
        pipeline.generate(prompts, [config] * count)
        return time.perf_counter() - started

    run(1, 32, 8)
    figures = {}
    for batch in (1, 16, 32):
        first = min(run(batch, 128, 1) for _ in range(2))
        whole = min(run(batch, 128, 65) for _ in range(2))
        figures[f"decode_{batch}"] = 64 * batch / (whole - first)
    figures["prefill_512"] = 512 / min(run(1, 512, 1) for _ in range(3))
    print(json.dumps(figures))


def logits(folder: str, tokens: str, out: str) -> None:
    """One forward pass through the exported model, without its cache."""
    import torch
    from optimum.intel import OVModelForCausalLM

    model = OVModelForCausalLM.from_pretrained(folder)
    ids = torch.from_numpy(np.load(tokens))[None]
    np.save(out, model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].float().numpy())


if __name__ == "__main__":
    {"speed": speed, "logits": logits}[sys.argv[1]](*sys.argv[2:])
