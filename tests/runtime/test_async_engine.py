"""The asynchronous engine: the same answers as the plain one, whoever reads, cancels or fails beside them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from enginewright.recipes.errors import RequestError
from enginewright.runtime.async_engine import AsyncEngine, Delta, EngineDied, Overloaded, Stream
from enginewright.runtime.constraints import Constraint
from enginewright.runtime.request import Request, SamplingOptions
from tests.runtime.server.serving import Paced, tiny_engine, write_tokenizer

PROMPTS = ["ABC", "D" * 30, "QRSTUVW", "Z", "HELLOX", "K" * 50]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path)


async def read(stream: Stream) -> list[Delta]:
    return [delta async for delta in stream]


def joined(deltas: list[Delta]) -> tuple[str, list[int], list[float], str | None]:
    return (
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids],
        [value for delta in deltas for value in delta.logprobs],
        deltas[-1].finish_reason,
    )


def alone(folder: Path, prompt: str, seed: int, **options: object) -> tuple[str, list[int], list[float], str]:
    with tiny_engine(folder) as engine:
        done = engine.generate(prompt, temperature=0.9, seed=seed, **options)[0]  # type: ignore[arg-type]
        return done.text, done.token_ids, done.logprobs, done.finish_reason


async def returned(engine: AsyncEngine) -> bool:
    """Whether every page has come back, checked between two steps with all invariants."""

    def look() -> bool:
        engine.engine.loop.scheduler.check_invariants()
        return engine.engine.loop.idle and engine.engine.loop.pool.idle

    return await engine.call(look)


def test_a_crowd_of_tasks_gets_what_each_gets_alone(folder):
    async def crowd() -> list[list[Delta]]:
        async with AsyncEngine(tiny_engine(folder, chunk_size=5)) as engine:
            streams = [
                await engine.generate(prompt, 12, temperature=0.9, seed=seed, ignore_eos=True)
                for seed, prompt in enumerate(PROMPTS)
            ]
            answers = await asyncio.gather(*map(read, streams))
            assert await returned(engine)
            return answers

    for seed, (prompt, deltas) in enumerate(zip(PROMPTS, asyncio.run(crowd()), strict=True)):
        assert joined(deltas) == alone(folder, prompt, seed, max_tokens=12, ignore_eos=True)


def test_a_constraint_is_compiled_and_an_unknown_option_named(folder):
    pytest.importorskip("llguidance")

    async def answers() -> tuple[str, list[int], list[float], str | None]:
        async with AsyncEngine(tiny_engine(folder)) as engine:
            with pytest.raises(
                RequestError, match=r"(?s)no sampling option colour.*expected: .*top_p.*min_tokens"
            ):
                await engine.generate("AB", 4, colour=3)
            with pytest.raises(RequestError, match="did you mean temperature"):
                await engine.generate("AB", 4, temprature=3)
            with pytest.raises(RequestError, match="the regular expression cannot be used"):
                await engine.generate("AB", 4, constraint=Constraint.regex("("))
            return joined(await read(await engine.generate("AB", 9, constraint=Constraint.regex("CAB|DEF"))))

    text, _, _, reason = asyncio.run(answers())
    assert text in ("CAB", "DEF") and reason == "stop"


def test_choices_submitted_together_share_a_stream(folder):
    async def choices() -> dict[int, list[Delta]]:
        async with AsyncEngine(tiny_engine(folder)) as engine:
            options = [SamplingOptions(8, 0.9, seed, ignore_eos=True) for seed in (3, 4, 5)]
            stream = await engine.submit([Request([1, 2, 3], option) for option in options])
            by_index: dict[int, list[Delta]] = {0: [], 1: [], 2: []}
            async for delta in stream:
                by_index[delta.index].append(delta)
            return by_index

    by_index = asyncio.run(choices())
    for index, seed in enumerate((3, 4, 5)):
        assert joined(by_index[index]) == alone(folder, "BCD", seed, max_tokens=8, ignore_eos=True)


def test_a_reader_that_sleeps_gets_all_of_it_in_few_pieces(folder):
    async def sleepy() -> tuple[list[Delta], int]:
        async with AsyncEngine(tiny_engine(folder)) as engine:
            stream = await engine.generate("AB", 100, temperature=0.9, seed=7, ignore_eos=True)
            while not stream.requests[0].finished:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            kept = sum(len(pieces) for pieces in stream._pending.values())
            return await read(stream), kept

    deltas, kept = asyncio.run(sleepy())
    assert kept <= 65 and len(deltas) == 1
    assert joined(deltas) == alone(folder, "AB", 7, max_tokens=100, ignore_eos=True)


@pytest.mark.parametrize("stage", ["queued", "prefill", "decode", "finished"])
def test_cancel_at_a_stage_frees_the_pages_before_the_next_step(folder, stage):
    async def cancel() -> str | None:
        executor = Paced(0.002)
        async with AsyncEngine(
            tiny_engine(folder, executor, max_sequences=1, chunk_size=4, token_budget=4)
        ) as engine:
            other = await engine.generate("XYZ", 40, ignore_eos=True) if stage == "queued" else None
            stream = await engine.generate("B" * 60, 20, ignore_eos=True)
            request = stream.requests[0]
            reached = {
                "queued": lambda: request.computed == 0,
                "prefill": lambda: 0 < request.computed < 60,
                "decode": lambda: len(request.tokens) > 64,
                "finished": lambda: request.finished,
            }[stage]
            while not reached():
                await asyncio.sleep(0.001)
            stream.cancel()
            stream.cancel()
            steps = await engine.call(lambda: len(executor.steps))
            if other is None:
                assert await returned(engine), "pages are held after the step"
                assert steps == len(executor.steps)
            else:
                assert joined(await read(other))[3] == "length"
                assert await returned(engine)
            return (await read(stream))[-1].finish_reason

    assert asyncio.run(cancel()) == ("length" if stage == "finished" else "abort")


def test_what_cannot_be_served_raises_and_leaves_nothing(folder):
    async def refused() -> None:
        executor = Paced()
        async with AsyncEngine(tiny_engine(folder, executor), max_unfinished=2) as engine:
            with pytest.raises(RequestError, match="too long"):
                await engine.generate("A" * 200)
            with pytest.raises(RequestError, match="prompt"):
                await engine.submit([Request([1]), Request([99])])
            with pytest.raises(RequestError, match="nothing to compute"):
                await engine.submit([])
            with pytest.raises(RequestError, match="ever takes"):
                await engine.submit([Request([1]), Request([2]), Request([3])])
            executor.gate.clear()
            waiting = await engine.submit([Request([1], SamplingOptions(ignore_eos=True))])
            with pytest.raises(Overloaded, match="full"):
                await engine.submit([Request([2]), Request([3])])
            waiting.cancel()
            executor.gate.set()
            assert [delta async for delta in waiting][-1].finish_reason in ("abort", "length")
            assert await returned(engine) and engine.unfinished == 0 and engine.idle

    asyncio.run(refused())


def test_a_fault_in_one_text_ends_that_request_alone(folder):
    async def fault() -> tuple[list[Delta], list[Delta]]:
        executor = Paced()
        async with AsyncEngine(tiny_engine(folder, executor)) as engine:
            executor.gate.clear()
            bad = await engine.generate("ABC", 30, ignore_eos=True)

            def broken(tokens: object) -> str:
                raise ValueError("no text today")

            bad.answers[0]._detokenizer.push = broken  # type: ignore[union-attr,assignment]
            executor.gate.set()
            good = await engine.generate("HELLO", 30, temperature=0.9, seed=2, ignore_eos=True)
            answers = await read(bad), await read(good)
            assert await returned(engine)
            return answers

    bad, good = asyncio.run(fault())
    assert bad[-1].finish_reason == "error" and "no text today" in str(bad[-1].error)
    assert joined(good) == alone(folder, "HELLO", 2, max_tokens=30, ignore_eos=True)


def test_a_dead_loop_ends_everything_and_says_so(folder):
    async def die() -> None:
        async with AsyncEngine(tiny_engine(folder, Paced(0.005))) as engine:
            stream = await engine.generate("ABC", 100, ignore_eos=True)

            def broken() -> None:
                raise MemoryError("out of everything")

            engine.engine.loop.step = broken  # type: ignore[method-assign,assignment]
            last = (await read(stream))[-1]
            assert last.finish_reason == "error" and isinstance(last.error, EngineDied)
            while engine.alive:
                await asyncio.sleep(0.001)
            with pytest.raises(EngineDied, match="out of everything"):
                await engine.generate("ABC")

    asyncio.run(die())


def test_closing_ends_what_is_unfinished(folder):
    async def close() -> list[Delta]:
        async with AsyncEngine(tiny_engine(folder, Paced(0.005))) as engine:
            stream = await engine.generate("ABC", 100, ignore_eos=True)
        return await read(stream)

    assert asyncio.run(close())[-1].finish_reason == "abort"


def test_progress_is_known_while_there_is_work(folder):
    async def stall() -> None:
        executor = Paced()
        async with AsyncEngine(tiny_engine(folder, executor)) as engine:
            assert engine.alive and engine.idle and engine.seconds_without_progress() == 0
            executor.gate.clear()
            stream = await engine.generate("ABC", 3, ignore_eos=True)
            await asyncio.sleep(0.1)
            assert not engine.idle and engine.seconds_without_progress() > 0.05
            executor.gate.set()
            await read(stream)
            assert engine.seconds_without_progress() == 0
            assert engine.figures.generated_tokens == 3 and engine.figures.finished["length"] == 1
            assert sum(engine.figures.first_token.counts) == 1 and sum(engine.figures.next_token.counts) == 2

    asyncio.run(stall())


async def _traffic(folder: Path, seed: int, count: int) -> None:
    """Random requests, cancels and faults on a pool that is too small; what survives is as it is alone."""
    rng = random.Random(seed)
    engine = tiny_engine(folder, Paced(crash_token=25), cache_tokens=96, chunk_size=7, max_context=64)
    survivors: list[tuple[str, int, int, list[Delta]]] = []

    async def one(number: int) -> None:
        await asyncio.sleep(rng.random() * count / 400)
        length = rng.randint(1, 40)
        prompt = "".join(rng.choice("ABCDEFGH") for _ in range(length))
        fate = rng.random()
        if fate < 0.1:
            prompt += "Z"  # crashes the executor
        budget = rng.randint(0, 20)
        options = {"temperature": 0.9, "seed": number, "ignore_eos": True}
        stream = await running.generate(prompt, budget, **options)
        if 0.1 <= fate < 0.2 and stream.answers[0]._detokenizer is not None:
            stream.answers[0]._detokenizer.push = lambda tokens: 1 // 0  # type: ignore[method-assign]
        deltas: list[Delta] = []
        stop_after = rng.randint(0, 6) if 0.2 <= fate < 0.5 else None
        if stop_after == 0:
            stream.cancel()
        async for delta in stream:
            deltas.append(delta)
            if stop_after is not None and len(deltas) == stop_after:
                stream.cancel()
        if deltas[-1].finish_reason == "length" and fate >= 0.2:
            survivors.append((prompt, budget, number, deltas))

    async with AsyncEngine(engine) as running:
        await asyncio.gather(*(one(number) for number in range(count)))
        assert running.alive and await returned(running)
    assert len(survivors) > count // 3
    with tiny_engine(folder, Paced(), max_context=64) as quiet:
        for prompt, budget, number, deltas in survivors[:: max(1, len(survivors) // 60)]:
            done = quiet.generate(prompt, budget, temperature=0.9, seed=number, ignore_eos=True)[0]
            assert joined(deltas) == (done.text, done.token_ids, done.logprobs, "length")


def test_random_traffic_with_cancels_and_faults(folder):
    asyncio.run(_traffic(folder, 0, 200))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 51))
def test_much_random_traffic(folder, seed):
    asyncio.run(_traffic(folder, seed, 200))
