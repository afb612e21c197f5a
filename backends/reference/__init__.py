"""The reference executor: a paged Program as it is, run in torch. Slow and exact.

It writes no engine and is no `--backend`: `ReferenceExecutor` takes a Program from memory and fulfils the executor's
contract, so that tests can hold another backend against it step by step.
"""
