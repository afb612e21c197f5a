"""The rules of `passes/normalise.py`, by kind of operation, and the rewriter they share."""
