"""Tests never ask a hub; the variable must be set before transformers is first imported."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
