"""The road to and from Hugging Face: weights, configuration and tokenizer of the ten families."""
