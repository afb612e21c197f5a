"""How an engine is held against its source model, through the path that serves requests."""

from .compare import verify
from .figures import Verification
from .samples import sample_tokens, text_tokens

__all__ = ["Verification", "sample_tokens", "text_tokens", "verify"]
