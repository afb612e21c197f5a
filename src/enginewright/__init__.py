"""enginewright: compile Hugging Face causal language models into verified serving engines, and serve them."""
