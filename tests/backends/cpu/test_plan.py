"""Planned buffers: no two values overlap while both are needed, and dead memory is used again."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from enginewright.backends.cpu.plan import Access, Buffer, plan

Program = tuple[list[Buffer], list[Access], list[int]]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    buffers: list[Buffer] = []
    accesses: list[Access] = []
    phase = 0
    for _ in range(draw(st.integers(1, 14))):
        reads = tuple(draw(st.lists(st.integers(0, len(buffers) - 1), max_size=3))) if buffers else ()
        writes, shares = [], []
        for _ in range(draw(st.integers(1, 2))):
            writes.append(len(buffers))
            buffers.append(
                Buffer(draw(st.sampled_from([4, 64, 100, 256])), draw(st.sampled_from(["tokens", "logits"])))
            )
            if reads and draw(st.booleans()):
                shares.append((writes[-1], draw(st.sampled_from(reads))))
        if buffers[:-1] and draw(st.integers(0, 4)) == 0:
            writes.append(draw(st.integers(0, len(buffers) - 1)))
        phase += draw(st.integers(0, 1))
        accesses.append(Access(reads, tuple(writes), phase, tuple(shares)))
    return buffers, accesses, draw(st.lists(st.integers(0, len(buffers) - 1), max_size=2))


def clashes(buffers: list[Buffer], accesses: list[Access], keep: list[int], offsets: list[int]) -> list[str]:
    """Run the program over one row, each value's index in its bytes; list the reads that find another's."""
    memory: dict[tuple[str, int], int] = {}
    found = []

    def span(value: int) -> list[tuple[str, int]]:
        buffer = buffers[value]
        return [(buffer.arena, byte) for byte in range(offsets[value], offsets[value] + buffer.bytes)]

    written: set[int] = set()
    for at, access in enumerate(accesses):
        for value in access.reads:
            if value in written and any(memory[byte] != value for byte in span(value)):
                found.append(f"instruction {at} reads value {value} after it was overwritten")
        for value in access.writes:
            allowed = {read for write, read in access.in_place if write == value}
            for other in {*access.reads, *access.writes} - allowed - {value}:
                if set(span(value)) & set(span(other)):
                    found.append(f"instruction {at} writes value {value} over its own operand {other}")
            memory.update(dict.fromkeys(span(value), value))
            written.add(value)
    for value in keep:
        if value in written and any(memory[byte] != value for byte in span(value)):
            found.append(f"value {value} does not survive to the end")
    return found


@settings(max_examples=300, deadline=None)
@given(programs())
def test_no_two_live_values_overlap(program: Program) -> None:
    buffers, accesses, keep = program
    result = plan(buffers, accesses, keep)
    assert clashes(buffers, accesses, keep, result.offsets) == []
    for buffer, offset in zip(buffers, result.offsets, strict=True):
        assert offset % 64 == 0 and offset + buffer.bytes <= result.totals[buffer.arena]


@settings(max_examples=200, deadline=None)
@given(programs())
def test_values_of_one_phase_never_overlap_across_rows(
    program: tuple[list[Buffer], list[Access], list[int]],
) -> None:
    """Two threads may stand at two instructions of a phase: only one buffer by design may be shared."""
    buffers, accesses, keep = program
    offsets = plan(buffers, accesses, keep).offsets
    for phase in {access.phase for access in accesses}:
        inside = [access for access in accesses if access.phase == phase]
        touched = sorted({value for access in inside for value in (*access.reads, *access.writes)})
        for i, left in enumerate(touched):
            for right in touched[:i]:
                apart = (
                    buffers[left].arena != buffers[right].arena
                    or offsets[left] + buffers[left].bytes <= offsets[right]
                    or offsets[right] + buffers[right].bytes <= offsets[left]
                )
                assert apart or (offsets[left], buffers[left]) == (offsets[right], buffers[right])


def test_a_chain_needs_two_buffers_and_in_place_needs_one() -> None:
    buffers = [Buffer(256, "tokens") for _ in range(6)]
    chain = [Access((i - 1,) if i else (), (i,), i) for i in range(6)]
    assert plan(buffers, chain).totals == {"tokens": 512}
    shared = [Access(a.reads, a.writes, a.phase, tuple((i, i - 1) for i in a.writes if i)) for a in chain]
    assert plan(buffers, shared).totals == {"tokens": 256}


def test_in_place_is_refused_while_the_input_is_still_needed() -> None:
    buffers = [Buffer(64, "tokens")] * 3
    accesses = [Access((), (0,), 0), Access((0,), (1,), 1, ((1, 0),)), Access((0, 1), (2,), 2)]
    result = plan(buffers, accesses)
    assert result.offsets[0] != result.offsets[1]


def test_one_input_is_taken_over_by_one_output() -> None:
    buffers = [Buffer(64, "tokens")] * 3
    accesses = [Access((), (0,), 0), Access((0,), (1, 2), 1, ((1, 0), (2, 0)))]
    result = plan(buffers, accesses)
    assert result.offsets[1] != result.offsets[2]


def test_the_output_survives_to_the_end() -> None:
    buffers = [Buffer(64, "logits")] * 3
    accesses = [Access((), (0,), 0), Access((), (1,), 1), Access((1,), (2,), 2)]
    offsets = plan(buffers, accesses, keep=[0]).offsets
    assert offsets[0] not in offsets[1:]
