"""The engine object over the fake executor: prompts in, text out, one at a time or many, streamed or not."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders
from tokenizers import models as tokenizer_models

from enginewright.backends.artifact import Artifact
from enginewright.backends.base import KvGroupInfo
from enginewright.recipes.errors import ArtifactError, InputError, RequestError
from enginewright.runtime.constraints import Constraint
from enginewright.runtime.engine import Engine, load
from enginewright.runtime.memory import plan_pages
from enginewright.runtime.pages import GroupSpec
from enginewright.runtime.request import derived_seed
from tests.runtime.fake_executor import FakeExecutor

LETTERS = [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ", "<|end|>", "<0xC3>", "<0xA9>", "<0xFF>", "ab", "▁"]
GROUPS = [GroupSpec(0, 4), GroupSpec(6, 4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    vocab = {letter: i for i, letter in enumerate(LETTERS)}
    tokenizer = tokenizers.Tokenizer(tokenizer_models.BPE(vocab, [], byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}<|end|>")
    return tmp_path


def make_engine(folder: Path, executor: FakeExecutor | None = None, **options) -> Engine:
    model = {"max_context": 64, "eos_token_ids": [26]}
    files = {path.name: {} for path in folder.iterdir()}
    manifest = {"model": model, "files": files, "backend": "fake", "target": "fake"}
    executor = executor or FakeExecutor(GROUPS, len(LETTERS))
    return Engine(Artifact(folder, manifest), executor, **{"max_sequences": 4, **options})


class Scripted(FakeExecutor):
    """Says a fixed text, whatever it is given: the token at position p is `script[p - prompt]`."""

    def __init__(self, script: list[int], prompt: int) -> None:
        super().__init__(GROUPS, len(LETTERS))
        self._script, self._prompt = script, prompt

    def step(self, step):
        logits = super().step(step)
        for r, row in enumerate(step.logit_rows.tolist()):
            place = int(step.positions[row]) + 1 - self._prompt
            logits[r] = 0
            logits[r, self._script[min(place, len(self._script) - 1)]] = 9
        return logits


@pytest.mark.parametrize(
    "model", [None, [], {}, *({"max_context": n} for n in ("64", None, True, 0, 10**12))]
)
def test_an_engine_that_does_not_state_its_context_is_refused(folder, model):
    manifest = {"files": {}} if model is None else {"files": {}, "model": model}
    with pytest.raises(ArtifactError, match=r"context holds(?s:.*)max_context"):
        Engine(Artifact(folder, manifest), FakeExecutor(GROUPS, len(LETTERS)))


def test_stream_adds_up_to_generate_and_company_changes_nothing(folder):
    prompts = ["ABC", "D" * 30, "QRSTUVW", "Z", "HELLOX", "K" * 50]
    with make_engine(folder, chunk_size=5) as engine:
        whole = engine.generate(
            prompts, max_tokens=12, temperature=0.9, seed=[1, 2, 3, 4, 5, 6], ignore_eos=True
        )
        pieces: dict[int, list[str]] = {i: [] for i in range(len(prompts))}
        ids: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
        reasons = {}
        for delta in engine.stream(
            prompts, max_tokens=12, temperature=0.9, seed=[1, 2, 3, 4, 5, 6], ignore_eos=True
        ):
            assert delta.index not in reasons
            pieces[delta.index].append(delta.text)
            ids[delta.index] += delta.token_ids
            if delta.finish_reason:
                reasons[delta.index] = delta.finish_reason
        assert engine.loop.idle and engine.loop.pool.idle
    for i, completion in enumerate(whole):
        assert completion.prompt == prompts[i] and completion.finish_reason == reasons[i] == "length"
        assert completion.token_ids == ids[i] and len(completion.logprobs) == len(ids[i]) == 12
        assert completion.text == "".join(pieces[i])
        with make_engine(folder) as alone:
            (again,) = alone.generate(prompts[i], max_tokens=12, temperature=0.9, seed=i + 1, ignore_eos=True)
        assert again.to_dict() == completion.to_dict()


@pytest.mark.parametrize(
    ("stop", "include", "text"),
    [
        ((), False, "ABCDEFGHIJKLé\ufffdab x".replace(" x", " ")),
        ("FGH", False, "ABCDE"),
        (["FGH", "DEFGHIJ"], True, "ABCDEFGH"),
        ("é", False, "ABCDEFGHIJKL"),
        ("<|end|>", False, "ABCDEFGHIJKLé\ufffdab "),
        ("<|end|>", True, "ABCDEFGHIJKLé\ufffdab <|end|>"),
        ("ab Q", False, "ABCDEFGHIJKLé\ufffdab "),
    ],
)
def test_text_and_stop_strings(folder, stop, include, text):
    script = [*range(12), 27, 28, 0, 29, 30, 31, 26]
    text = text.replace("é\ufffd", "éA\ufffd")
    for ignore_eos in (False, True) if stop and text != "ABCDEFGHIJKLéA\ufffdab " else (False,):
        with make_engine(folder, Scripted(script, 2)) as engine:
            options = {"max_tokens": 40, "stop": stop, "include_stop": include, "ignore_eos": ignore_eos}
            (completion,) = engine.generate("XY", **options)
            streamed = list(engine.stream("XY", **options))
            assert engine.loop.pool.idle
        assert (completion.text, completion.finish_reason) == (text, "stop")
        assert "".join(delta.text for delta in streamed) == text
        assert streamed[-1].finish_reason == "stop"


def test_a_character_cut_by_the_limit(folder):
    with make_engine(folder, Scripted([0, 27, 28], 1)) as engine:
        (completion,) = engine.generate("X", max_tokens=2)
        assert (completion.text, completion.finish_reason) == ("A\ufffd", "length")


def test_prompts_of_every_shape(folder):
    with make_engine(folder) as engine:
        assert [c.prompt_token_ids for c in engine.generate("AB", 1)] == [[0, 1]]
        assert [c.prompt_token_ids for c in engine.generate([3, 4], 1)] == [[3, 4]]
        assert [c.prompt_token_ids for c in engine.generate([[3, 4], np.array([5])], 1)] == [[3, 4], [5]]
        assert engine.generate([], 1) == []
        (chat,) = engine.generate("AB", 1, chat=True)
        assert chat.prompt_token_ids == [0, 1, 26] and chat.prompt == "AB<|end|>"
        conversation = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
        assert engine.generate(conversation, 1, chat=True)[0].prompt == "AB<|end|>"
        assert len(engine.generate([conversation, "C"], 1, chat=True)) == 2
        assert engine.generate("A", 0)[0].finish_reason == "length"


def test_errors_of_one_prompt(folder):
    executor = FakeExecutor([GroupSpec(0, 4), GroupSpec(6, 4)], len(LETTERS), poison_token=25)
    with make_engine(folder, executor) as engine:
        with pytest.raises(RequestError, match="too long"):
            engine.generate(["A", "B" * 64], 4)
        assert engine.loop.idle and engine.loop.pool.idle
        with pytest.raises(RequestError, match="NaN"):
            engine.generate(["A", "AZ"], 1)
        fine, long, poisoned = engine.generate(["A", "B" * 64, "AZ"], 1, errors="return")
        assert fine.error is None and len(fine.token_ids) == 1
        assert long.finish_reason == poisoned.finish_reason == "error"
        assert "too long" in str(long.error) and "NaN" in poisoned.to_dict()["error"]
        last = list(engine.stream(["AZ", "A"], 1, ignore_eos=True))
        assert {delta.index: delta.finish_reason for delta in last} == {0: "error", 1: "length"}
        with pytest.raises(RequestError, match="one seed"):
            engine.generate(["A", "B"], 1, seed=[1])
        with pytest.raises(RequestError, match="seed"):
            engine.generate("A", 1, seed="7")
        with pytest.raises(RequestError, match="prompts"):
            engine.generate(5, 1)
    with pytest.raises(RequestError, match="closed"):
        engine.generate("A", 1)
    assert executor.closed


def test_an_abandoned_stream_frees_its_pages(folder):
    with make_engine(folder) as engine:
        stream = engine.stream(["A", "B" * 20], max_tokens=30, ignore_eos=True)
        next(stream)
        assert not engine.loop.pool.idle
        stream.close()
        assert engine.loop.idle and engine.loop.pool.idle


def test_threads_share_one_loop(folder):
    with make_engine(folder) as engine:
        expected = [engine.generate([i, 3, i], 20, ignore_eos=True)[0].token_ids for i in range(8)]
        answers: dict[int, list[int]] = {}

        def ask(i: int) -> None:
            answers[i] = engine.generate([[i, 3, i]], 20, ignore_eos=True)[0].token_ids

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answers[i] for i in range(8)] == expected
        assert engine.loop.pool.idle


def test_logits_follow_the_tokens(folder):
    with make_engine(folder) as engine:
        rows = engine.logits([[0, 1, 2, 3], [5]])
        assert [r.shape for r in rows] == [(4, 32), (1, 32)] and rows[0].dtype == np.float32
        assert np.array_equal(engine.logits([[0, 1, 2, 3]], chunk_size=1)[0], rows[0])
        (completion,) = engine.generate([[0, 1, 2, 3]], 1, ignore_eos=True)
        assert completion.token_ids == [int(rows[0][3].argmax())]
        assert engine.logits([[1] * 64])[0].shape == (64, 32)  # exactly the context
        with pytest.raises(RequestError, match="too long"):
            engine.logits([[1] * 65])
        assert engine.logits([]) == []


def test_an_engine_without_a_tokenizer(tmp_path):
    with make_engine(tmp_path) as engine:
        assert engine.tokenizer is None
        (completion,) = engine.generate([[1, 2]], 3, ignore_eos=True)
        assert completion.text == "" and len(completion.token_ids) == 3
        with pytest.raises(RequestError, match="no tokenizer"):
            engine.generate("A", 3)
        with pytest.raises(RequestError, match="tokenizer"):
            engine.generate([[1]], 3, stop="x")


def test_load_refuses_options_by_name(tmp_path):
    for option in ({"threads": 0}, {"weights": "hope"}, {"token_budget": -1}, {"cache_bytes": 1.5}):
        with pytest.raises(InputError, match=next(iter(option))):
            load(tmp_path, **option)
    with pytest.raises(InputError, match="no engine"):
        load(tmp_path / "nothing")


def test_the_cache_is_as_large_as_asked_and_never_larger_than_useful():
    groups = [KvGroupInfo(0, 4, 64, "f32", 1), KvGroupInfo(6, 4, 32, "bf16", 1)]
    common = {"max_context": 64, "max_sequences": 4, "chunk": 16}
    assert plan_pages(groups, tokens=None, limit_bytes=1 << 30, **common) == [64, 24]
    assert plan_pages(groups, tokens=20, limit_bytes=1, **common) == [5, 5]
    pages = plan_pages(groups, tokens=None, limit_bytes=3000, **common)
    assert 2000 < sum(n * group.page_bytes for n, group in zip(pages, groups, strict=True)) <= 3000
    with pytest.raises(InputError, match="room for nothing"):
        plan_pages(groups, tokens=None, limit_bytes=50, **common)
    for most, wanted in (([40, 30], [40, 24]), ([40, 12], [40, 12]), ([64, 24], [64, 24])):
        assert plan_pages(groups, tokens=None, limit_bytes=1 << 30, most_pages=most, **common) == wanted
        assert plan_pages(groups, tokens=20, limit_bytes=1, most_pages=most, **common) == [5, 5]


def test_an_engine_stays_within_what_its_executor_can_have(folder):
    """Small steps and pools that cannot grow: as many sequences a step as fit, and no more pages than there can be."""

    class Small(FakeExecutor):
        max_pages = (7, 6)

        def create_pool(self, pages):
            assert all(1 <= count <= most for count, most in zip(pages, self.max_pages, strict=True))
            super().create_pool(pages)

    executor = Small(GROUPS, len(LETTERS))
    executor.max_tokens, executor.max_rows = 3, 2
    engine = make_engine(folder, executor)
    assert engine.cache_tokens == 28
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7]]
    found = engine.generate(prompts, max_tokens=8, ignore_eos=True)
    wanted = make_engine(folder).generate(prompts, max_tokens=8, ignore_eos=True)
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]


@pytest.mark.parametrize("work", ["generate", "logits"])
def test_closing_waits_for_the_running_step_and_ends_the_others(folder, work):
    started, seen = threading.Event(), []

    class Slow(FakeExecutor):
        def step(self, step):
            started.set()
            time.sleep(0.05)
            seen.append(self.closed)
            return super().step(step)

    engine = make_engine(folder, Slow(GROUPS, len(LETTERS)), chunk_size=1)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(getattr(engine, work), [[1] * 40])
        assert started.wait(10)
        engine.close()
        with pytest.raises(RequestError, match="the engine is closed"):
            answer.result(10)
    assert engine.executor.closed and not any(seen)


def test_several_answers_a_prompt_are_those_of_their_seeds(folder):
    prompts = ["ABCDEFGHIJKLMNOPQ", "B"]
    fields = {"max_tokens": 9, "temperature": 1.0, "logprobs": 2, "top_p": 0.95}
    with make_engine(folder) as engine:
        several = engine.generate(prompts, n=3, seed=[7, 8], **fields)
        assert [(c.prompt, c.choice) for c in several] == [(p, i) for p in prompts for i in range(3)]
        for place, completion in enumerate(several):
            seed = derived_seed([7, 8][place // 3], place % 3)
            (alone,) = engine.generate(prompts[place // 3], seed=seed, **fields)
            assert (completion.token_ids, completion.logprobs) == (alone.token_ids, alone.logprobs)
            assert completion.top_logprobs == alone.top_logprobs and len(alone.top_logprobs[0]) == 2
        assert len({tuple(c.token_ids) for c in several[:3]}) == 3
        texts = {(p, i): "" for p in range(2) for i in range(3)}
        for delta in engine.stream(prompts, n=3, seed=[7, 8], **fields):
            texts[delta.index, delta.choice] += delta.text
        assert list(texts.values()) == [c.text for c in several]
        greedy = engine.generate("AB", max_tokens=5, n=4)
        assert len({tuple(c.token_ids) for c in greedy}) == 1
        for n in (0, -1, 129, 1.5, True, "2"):
            with pytest.raises(RequestError, match="n cannot"):
                engine.generate("AB", n=n)
        assert engine.loop.idle and engine.loop.pool.idle


def test_options_are_known_by_name(folder):
    with make_engine(folder) as engine:
        with pytest.raises(RequestError, match=r"top_pp.*\n.*did you mean top_p"):
            engine.generate("A", top_pp=0.5)
        with pytest.raises(RequestError, match="top_p"):
            engine.generate("A", top_p=1.5)
        for bad in ({"logit_bias": {999: 1.0}}, {"stop_token_ids": [32]}):
            with pytest.raises(RequestError, match=next(iter(bad))):
                engine.generate("A", **bad)
        assert engine.loop.idle


def test_a_stop_string_waits_for_the_least_length(folder):
    script = [LETTERS.index(letter) for letter in "XYXYXYZZZZ"]
    answers = {}
    for least in (0, 1, 2, 3, 6):
        with make_engine(folder, Scripted(script, 1)) as engine:
            (completion,) = engine.generate("A", max_tokens=10, stop="XY", min_tokens=least)
            pieces = [delta.text for delta in engine.stream("A", max_tokens=10, stop="XY", min_tokens=least)]
            answers[least] = completion.text
            assert "".join(pieces) == completion.text
    assert answers == {0: "", 1: "XY", 2: "XY", 3: "XYXY", 6: "XYXYXYZZZZ"}


def test_a_constraint_is_compiled_before_anything_is_queued(folder):
    pytest.importorskip("llguidance")
    with make_engine(folder) as engine:
        with pytest.raises(RequestError, match="regular expression"):
            engine.generate(["A", "B"], constraint=Constraint.regex("("))
        assert engine.loop.idle
        for completion in engine.generate(
            ["A", "B"], constraint=Constraint.regex("(AB|BA)C"), temperature=1.0, n=2
        ):
            assert completion.text in ("ABC", "BAC") and completion.finish_reason == "stop"
